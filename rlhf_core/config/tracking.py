"""Settings of trackers, besides metrics.jsonl."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.texts import Project


class TrackingConfig(Config):
    wandb: bool = Field(default=True, description="Weights & Biases; offline where there is no key")
    wandb_project: Project = Field(default="alignment", description="project that the runs belong to")
    tensorboard: bool = Field(default=True, description="event files, kept in the artifact")
