"""Validation of the settings that a recipe passes on to a library, by the library, in a process of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rlhf_core.config.engines.passed import Library, passed_settings
from rlhf_core.errors import StageError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.kept import kept
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.trial import tried

_SECONDS = 180.0  # vLLM is imported in ten, on cores without other work
_MEMORY = 8 << 30  # bytes


def check_passed(nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Yield a problem for each setting that its library does not know or take.

    On a machine without the library the stage's job is the first to ask it.
    """
    for node in nodes.values():
        for path, library, settings in passed_settings(node.config):
            if find_spec(library.module) is None:
                continue
            for name, problem in _problems(library, settings):
                yield f"{node.section}.{path}.{name}: {problem}"


def _problems(library: Library, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    answer: list[tuple[str, str]] = json.loads(
        kept("passed", _digest(library, settings), lambda: json.dumps(_asked(library, settings)))
    )
    return answer


def _digest(library: Library, settings: Mapping[str, Any]) -> str:
    code = Path(resolve_name(library.problems).__code__.co_filename)
    installed = sorted((name, version(name)) for name in packages_distributions()[library.module])
    digest = hashlib.sha256(code.read_bytes())
    digest.update(json.dumps([library.name, installed, settings], sort_keys=True).encode())
    return digest.hexdigest()


def _asked(library: Library, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    failed = f"{library.name} could not validate the settings passed on to it"
    try:
        problems: list[tuple[str, str]] = tried(_SECONDS, _MEMORY, resolve_name(library.problems), settings)
    except TimeoutError as error:
        raise StageError(f"{failed}: no answer within {_SECONDS:g} s; try again") from error
    except (MemoryError, ProcessError) as error:
        reason = f"needs more than {_MEMORY >> 30} GiB" if isinstance(error, MemoryError) else str(error)
        raise StageError(f"{failed}: its process {reason}") from error
    return problems
