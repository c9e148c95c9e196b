"""Settings of trackers, besides metrics.jsonl."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.texts import Project


class TrackingConfig(Config):
    wandb: bool = Field(default=True, description="Weights & Biases; offline without a key")
    wandb_project: Project = Field(default="alignment", description="project of the runs")
    tensorboard: bool = Field(default=True, description="TensorBoard event files, kept in the artifact")
