"""Where a reward comes from. A reward is what trains; a score (0-1) is what filters and evaluates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Config, PositiveFloat, PositiveInt


class RewardModelReward(Config):
    """The run's own reward model; `normalize` subtracts its stored mean and divides by its stored std."""

    type: Literal["reward_model"]
    normalize: bool = True


class VerifierReward(Config):
    """`exact`: the answer found in the completion equals the row's `answer`. `reasoning_gym`: the task's own scorer."""

    type: Literal["verifier"]
    kind: Literal["exact", "reasoning_gym"] = "exact"
    pattern: str | None = Field(None, description="regular expression whose group 1 is the answer; none: the whole text")


class FunctionReward(Config):
    """`function(completions, prompts, rows, **options)` of a Python file; returns one float or {reward, score, ...} each."""

    type: Literal["function"]
    path: str
    function: str = "reward"
    options: dict[str, Any] = {}
    timeout_seconds: PositiveFloat = 60.0
    batch_size: PositiveInt = 4096


RewardConfig = Annotated[RewardModelReward | VerifierReward | FunctionReward, Field(discriminator="type")]
ScorerConfig = Annotated[VerifierReward | FunctionReward, Field(discriminator="type")]
