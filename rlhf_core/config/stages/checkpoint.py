"""Intervals at which a training stage saves its state, from which a killed job resumes."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Copies, Minutes, Steps


class CheckpointConfig(Config):
    """A checkpoint is written when either interval has passed; without both there are none."""

    every_steps: Steps | None = Field(default=None, description="steps between two checkpoints; none: no limit")
    every_minutes: Minutes | None = Field(default=10.0, description="minutes between two checkpoints; none: no limit")
    keep: Copies = Field(
        default=1, description="number of complete checkpoints kept in the store until the stage is done"
    )
    resume: bool = Field(
        default=True,
        description="resume from the newest complete checkpoint; false: delete those that exist and start at step 0",
    )
