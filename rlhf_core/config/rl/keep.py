"""Artifacts that an RL stage publishes of single steps, beside its result."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Steps


class KeepConfig(Config):
    rollouts_every: Steps | None = Field(
        default=None,
        description="steps between two whose completions, those that train, are kept as a dataset of the format "
        "completions; none: none are",
    )
    policy_every: Steps | None = Field(
        default=None, description="steps between two whose policy, or adapter, is kept after the update; none: none is"
    )
