"""Validation of the settings that a recipe passes on to vLLM. Importing this module imports no library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import did_you_mean, reason_of
from rlhf_core.rollout.vllm.environment import set_vllm_environment


def problems(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the dotted name and the problem of each setting that is no argument of vLLM's engine, or of another type.

    What only the model, the device and other settings decide is found when an engine starts.
    """
    return _validated(settings)[1]


def passed_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM. Raises ValueError if vLLM does not take them."""
    arguments, wrong = _validated(settings)
    if wrong:
        raise ValueError("; ".join(f"rollout.vllm.{name}: {problem}" for name, problem in wrong))
    return arguments


def _validated(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    set_vllm_environment()
    from pydantic import TypeAdapter, ValidationError
    from vllm.engine.arg_utils import EngineArgs

    fields: dict[str, Any] = {
        name: field for name, field in EngineArgs.__dataclass_fields__.items() if not name.startswith("_")
    }
    arguments: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for name, value in settings.items():
        if name not in fields:
            wrong.append((name, f"vLLM has no such setting{did_you_mean(name, fields)}"))
            continue
        try:
            # Through JSON, so that strict types still take a list for a set, and text for an enum.
            arguments[name] = TypeAdapter(fields[name].type).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            wrong += [(_dotted(name, value, problem["loc"]), _described(problem)) for problem in error.errors()]
        except Exception as error:  # whatever a check of vLLM raises
            wrong.append((name, f"vLLM does not take it: {reason_of(error)}"))
    return arguments, list(dict(wrong).items())


def _dotted(name: str, value: Any, location: tuple[Any, ...]) -> str:
    """Leave out the names of types, which pydantic puts into a location too."""
    for part in location:
        if isinstance(value, dict) and part in value:
            name, value = f"{name}.{part}", value[part]
    return name


def _described(problem: Mapping[str, Any]) -> str:
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return "vLLM has no such setting"
    return reason_of(ValueError(problem["msg"]))
