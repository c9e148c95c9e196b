"""A kind of rollout engines: every completion is one token, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.engines.rollout import EngineEntry, RolloutEngineConfig
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.scripted import ScriptedEngine


class ConstantEngineConfig(RolloutEngineConfig):
    """Engines that sample one token."""

    type: Literal["constant"]
    token: int = Field(default=5, description="the token")


def start(folder: Path, settings: EngineSettings) -> ScriptedEngine:
    config = settings.config
    assert isinstance(config, ConstantEngineConfig)
    return ScriptedEngine(lambda prompt, seed: [config.token] * config.max_length, max_length=config.max_length)


def problems(
    settings: Mapping[str, Any], class_settings: Mapping[str, Any], engine: ConstantEngineConfig, dtype: str | None
) -> Iterator[str]:
    """Yield the reasons why engines of this kind cannot serve a model."""
    vocabulary = settings.get("vocab_size", 1000)
    if engine.token >= vocabulary:
        yield f"token is {engine.token}, but the vocabulary has {vocabulary}"


def set_environment() -> None:
    """Set the variables that the engine's library reads at its import: none."""


def call_reader(name: str, tokenizer: Any, tools: Any) -> Any:
    raise NotImplementedError("engines of this kind read no calls of tools")


CONSTANT = EngineEntry(
    ConstantEngineConfig,
    "alignment_example.engine:start",
    checks="alignment_example.engine:problems",
    tool_parser="alignment_example.engine:call_reader",
    library="alignment_example",
    distributions=("alignment-example",),
    environment="alignment_example.engine:set_environment",
)
