"""The key of a stage's result: same key, same result, so it is never computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import Config, result_settings
from rlhf_core.config.engines.rollout import ENGINES
from rlhf_core.config.inputs import input_settings
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.benchmark import HARNESS
from rlhf_core.contract import Stage
from rlhf_core.errors import RecipeError, reason_of
from rlhf_core.system.variables import folder_of

COMPUTING_LIBRARIES = ("torch", "vllm", "deepspeed", "transformers", "peft")
# Those of single stages -> what pip installs them by.
OPTIONAL_LIBRARIES: Mapping[str, str] = MappingProxyType({HARNESS: "alignment[benchmarks]"})


def stage_key(
    stage: Stage,
    config: Config,
    *,
    inputs: Mapping[str, ArtifactRef],
    user_files: Mapping[str, str],
    seed: int | None,
    libraries: Mapping[str, str],
    pins: Mapping[str, str] = MappingProxyType({}),
    rerun: str = "",
) -> str:
    """Return the SHA-256 (hex) over canonical JSON of all that can change the result. Pure: no clock, no environment.

    seed: of a stage that draws random numbers; None: this one draws none. rerun: label of a computation that is
    repeated on purpose, whose result is another one than that of the same key without it.
    """
    identity: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "config": result_settings(config),
        "inputs": _without_chosen_names(config, {name: f"{ref.stage}/{ref.key}" for name, ref in inputs.items()}),
        "user_files": dict(user_files),
        "libraries": used_libraries(config, libraries),
    }
    if seed is not None:
        identity["seed"] = seed
    if pins:  # a stage without remote sources keeps the key that it had before there were pins
        identity["pins"] = dict(pins)
    if rerun:
        identity["rerun"] = rerun
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_chosen_names(config: Config, inputs: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Replace several inputs of one setting, which have names of the recipe's choice, by a sorted list."""
    named = dict(inputs)
    lists = {
        setting.path: sorted(named.pop(name) for name in setting.input_names)
        for setting in input_settings(config)
        if setting.many and not setting.reads.each and setting.names
    }
    return {**named, **lists}


def used_libraries(config: Config, libraries: Mapping[str, str]) -> dict[str, str]:
    """Return the libraries without those that only other stages use; those of COMPUTING_LIBRARIES are in every key.

    Raises RecipeError, with the remedy, if one that the stage uses is missing.
    """
    engines = config.engines if isinstance(config, StageConfig) else None
    own = None if engines is None else ENGINES[engines.type].library
    if own is not None and own not in COMPUTING_LIBRARIES and own not in libraries:
        raise RecipeError(f"{own}, which the engines of this stage are of, is not installed here")
    optional = config.libraries if isinstance(config, StageConfig) else ()
    for library in optional:
        if library not in libraries:
            raise RecipeError(f"{library} is not installed here: run `pip install '{OPTIONAL_LIBRARIES[library]}'`")
    others = {entry.library for entry in ENGINES.values()} - {own, *COMPUTING_LIBRARIES}
    others |= OPTIONAL_LIBRARIES.keys() - set(optional)
    return {library: its for library, its in libraries.items() if library not in others}


def computing_libraries() -> dict[str, str]:
    """Return the installed versions of the libraries that compute, including ours.

    Raises RecipeError for one that is not installed, unless only a kind of engines, or of stages, needs it.
    """
    return _versions(_installed_version, "is not installed here: run `make setup`, or see docs/operate/setup.md")


def node_libraries() -> dict[str, str]:
    """Return the versions of the libraries that compute as nodes have them, which each job compares with its own.

    They are those of the lock file ALIGNMENT_NODE_LOCK, on a machine that only submits runs; else the installed ones.
    Raises RecipeError as `computing_libraries`, and for a lock that cannot be read.
    """
    lock = folder_of("ALIGNMENT_NODE_LOCK")
    if lock is None:
        return computing_libraries()
    versions = _locked_versions(lock)
    return _versions(versions.get, f"has no version in {lock}, the lock of the nodes (ALIGNMENT_NODE_LOCK)")


def _versions(version_of: Callable[[str], str | None], missing: str) -> dict[str, str]:
    """Return the versions of what computes.

    version_of: returns that of a distribution, None for one that is missing.
    """
    from rlhf_core import __version__

    distributions = {entry.library: entry.distributions for entry in ENGINES.values()}
    versions = {"alignment": __version__}
    for library in dict.fromkeys((*COMPUTING_LIBRARIES, *distributions, *OPTIONAL_LIBRARIES)):
        found = next(filter(None, map(version_of, distributions.get(library, (library,)))), None)
        if found is not None:
            versions[library] = found
        elif library in COMPUTING_LIBRARIES:
            raise RecipeError(f"{library} {missing}")
    return versions


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _locked_versions(lock: Path) -> dict[str, str]:
    """Return the versions of a requirements file by distribution, of the lines `name==version` and `name===version`."""
    try:
        lines = (line.partition("#")[0].partition(";")[0].strip() for line in lock.read_text("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the lock of the nodes cannot be read: {reason_of(error)}") from error
    pins = (line.partition("==") for line in lines)
    return {name.strip(): pinned.removeprefix("=").strip() for name, _, pinned in pins if pinned}
