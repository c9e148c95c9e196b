"""Intervals at which a stage stores what it has done, from which a killed job resumes."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Copies, Minutes, Steps


class PartialResultsConfig(Config):
    """Intervals at which a stage that trains nothing stores the part of its result that is complete."""

    every_minutes: Minutes | None = Field(default=10.0, description="minutes between two checkpoints; none: no limit")
    resume: bool = Field(
        default=True,
        description="resume from the newest complete checkpoint; false: delete those that exist and start at step 0",
    )

    def position(self, step: int) -> str:
        """Return the position of a checkpoint in words."""
        return f"from {step} kept rows"


class CheckpointConfig(PartialResultsConfig):
    """A checkpoint is written when either interval has passed; without both there are none."""

    every_steps: Steps | None = Field(default=None, description="steps between two checkpoints; none: no limit")
    keep: Copies = Field(
        default=1, description="number of complete checkpoints kept in the store until the stage is done"
    )

    def position(self, step: int) -> str:
        return f"from step {step}"
