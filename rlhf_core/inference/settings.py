"""Options of the model commands, as the settings of recipes. Loads no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_core.config.base import Config
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.recipe.mistakes import sentence
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml

C = TypeVar("C", bound=Config)

MEMORY_SHARE = 0.9  # of a GPU, for all engines of a command


def sampling_config(**values: float) -> SamplingConfig:
    """Build the sampling settings from options of these names."""
    return _validated(SamplingConfig, values, lambda key: f"--{key.replace('_', '-')}")


def _validated(config: type[C], values: Mapping[str, Any], called: Callable[[str], str]) -> C:
    """Validate settings. called: their names for messages. Raises RecipeError, in one sentence, for an invalid one."""
    try:
        return config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise RecipeError(
            "; ".join(_sentence(config, values, problem, called) for problem in error.errors())
        ) from error


def engine_config(overrides: Sequence[str], *, max_length: int, engines: int = 1) -> VllmEngineConfig:
    """Build the settings of one of `engines` engines on this machine. overrides: `key=value`, settings of `rollout`."""
    values: dict[str, Any] = {
        "max_length": max_length,
        "threads": max(1, (os.cpu_count() or 1) // engines),
        "memory_share": MEMORY_SHARE / engines,
    }
    for setting in overrides:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--rollout {setting}: write it as key=value, such as max_length=2048")
        try:
            values[key.strip()] = read_yaml(text)
        except YAMLTextError as error:
            raise RecipeError(f"--rollout {setting}: {error}") from error
    return _validated(VllmEngineConfig, values, lambda key: f"--rollout {key}")


def _sentence(
    config: type[Config], values: Mapping[str, Any], problem: Mapping[str, Any], called: Callable[[str], str]
) -> str:
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    key = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{called(key)}: there is no such setting{did_you_mean(key, config.model_fields)}"
    # In the words that recipes have for it, where the same settings stand below a stage.
    place = ("evaluation", "sampling" if config is SamplingConfig else "rollout")
    inside = {place[0]: {place[1]: values}}
    _, reason = sentence(inside, {**problem, "loc": (*place, *problem["loc"])})
    return re.sub(rf"`{'.'.join(place)}\.([^`]*)`", lambda match: called(match[1]), reason)
