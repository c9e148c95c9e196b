"""Settings of records of single RL steps: artifacts beside the result, and logged rollouts among its files."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import GroupSize, Steps


class KeepConfig(Config):
    rollouts_every: Steps | None = Field(
        default=None,
        description="interval, in steps, of keeping the training completions as a dataset of the format completions; "
        "none: never",
    )
    policy_every: Steps | None = Field(
        default=None, description="interval, in steps, of keeping the policy, or adapter, after the update; none: never"
    )


class LogRolloutsConfig(Config):
    """Rollouts that are logged for people, token by token."""

    prompts: GroupSize = Field(
        default=4,
        description="prompts of a step whose completions are logged: those with the lowest and the highest reward, and "
        "the first others",
    )
    steps: Steps = Field(default=100, description="most steps that are logged: the first, the last, and evenly between")

    def includes(self, step: int, total: int) -> bool:
        """Return whether `step`, counted from 1, of `total` is logged."""
        if self.steps >= total:
            return True
        if self.steps == 1:
            return step == total
        intervals = self.steps - 1
        return (step - 1) * intervals // (total - 1) > (step - 2) * intervals // (total - 1)
