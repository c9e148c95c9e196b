"""Artifacts that an RL stage publishes of single steps, beside its result."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Steps


class KeepConfig(Config):
    rollouts_every: Steps | None = Field(
        default=None,
        description="interval, in steps, of keeping the training completions as a dataset of the format completions; "
        "none: never",
    )
    policy_every: Steps | None = Field(
        default=None, description="interval, in steps, of keeping the policy, or adapter, after the update; none: never"
    )
