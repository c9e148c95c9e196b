"""Where a reward comes from. A reward is what trains; a score (0-1) is what filters and evaluates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Config, PositiveFloat, PositiveInt


class RewardModelReward(Config):
    """The run's own reward model; `normalize` subtracts its stored mean and divides by its stored std."""

    type: Literal["reward_model"]
    normalize: bool = Field(
        default=True, description="subtract the stored mean of the rewards and divide by their standard deviation"
    )


class VerifierReward(Config):
    """`exact`: the answer found in the completion equals the row's `answer`. `reasoning_gym`: the task's own scorer."""

    type: Literal["verifier"]
    kind: Literal["exact", "reasoning_gym"] = Field(
        default="exact", description="compare with the row's `answer`, or ask the task's own scorer"
    )
    pattern: str | None = Field(
        default=None, description="regular expression whose group 1 is the answer; none: the whole text"
    )


class FunctionReward(Config):
    """`function(completions, prompts, rows, **options)` of a Python file; a float or {reward, score, ...} for each."""

    type: Literal["function"]
    path: str = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: str = Field(default="reward", description="its name in the file")
    options: dict[str, Any] = Field(default={}, description="further keyword arguments")
    timeout_seconds: PositiveFloat = Field(default=60.0, description="longest call; a later answer is an error")
    batch_size: PositiveInt = Field(default=4096, description="completions of one call at most")


RewardConfig = Annotated[RewardModelReward | VerifierReward | FunctionReward, Field(discriminator="type")]
ScorerConfig = Annotated[VerifierReward | FunctionReward, Field(discriminator="type")]
