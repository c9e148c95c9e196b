"""Settings of trackers, besides metrics.jsonl. `TRACKERS` lists those that plugins add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.plugins import Table
from rlhf_core.config.texts import JudgeName, Project
from rlhf_core.config.typed import TypedConfig


class TrackerConfig(TypedConfig):
    """Every tracker of a plugin."""

    family: ClassVar[str] = "tracker"

    @classmethod
    def table(cls) -> Table[Any]:
        return TRACKERS


@dataclass(frozen=True, slots=True)
class TrackerEntry:
    config: type[TrackerConfig]
    # "package.module:Class" of a tracking.sink.Sink, made by `of(config, folder, about)`; imported where metrics are
    # logged
    implementation: str


TRACKERS: Table[TrackerEntry] = Table("trackers", TrackerEntry, {})


class TrackingConfig(Config):
    wandb: bool = Field(default=True, description="Weights & Biases; offline without a key")
    wandb_project: Project = Field(default="alignment", description="project of the runs")
    tensorboard: bool = Field(default=True, description="TensorBoard event files, kept in the artifact")
    others: dict[JudgeName, TrackerConfig] = Field(
        default={}, description="name -> tracker of an installed plugin; its files are kept in the artifact"
    )
