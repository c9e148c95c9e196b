"""Settings of reward shaping, in a fixed order (rewards/shaping.py), and of filtering by score."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Oversampling, PositiveReward, Reward, Rounds, Share, Tokens


class OverlongConfig(Config):
    """Soft overlong punishment, eq. 13 of arXiv:2503.14476: from 0 to -penalty over the last `buffer` tokens."""

    buffer: Tokens = Field(description="number of tokens before `sampling.max_tokens` over which the penalty grows")
    penalty: PositiveReward = Field(default=1.0, description="penalty of a completion of the maximum length")


class TruncationConfig(Config):
    """The reward of a completion that was truncated at the maximum length: exactly one of the two."""

    factor: Share | None = Field(default=None, description="factor of a positive reward")
    reward: Reward | None = Field(default=None, description="replacement of the reward")

    @model_validator(mode="after")
    def _one(self) -> TruncationConfig:
        if (self.factor is None) == (self.reward is None):
            raise ValueError("give either `factor` or `reward`")
        return self


class ShapingConfig(Config):
    """Applied to the weighted sum of a completion's rewards, in this order. Rewards of single steps are not shaped."""

    overlong: OverlongConfig | None = Field(default=None, description="penalty that grows towards the maximum length")
    truncation: TruncationConfig | None = Field(default=None, description="reward of truncated completions")
    clip: tuple[Reward, Reward] | None = Field(default=None, description="lowest and highest reward")
    normalize: bool = Field(
        default=False, description="subtract the mean of all rewards of the run so far, divide by their deviation"
    )

    @model_validator(mode="after")
    def _range(self) -> ShapingConfig:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip is [{self.clip[0]:g}, {self.clip[1]:g}]: the first must be less than the second")
        return self


class FilteringConfig(Config):
    """Dynamic sampling, section 3.2 of arXiv:2503.14476: drops prompts answered all wrong or all right, which teach
    nothing.

    A prompt's completions are trained on only if low < mean score < high; new prompts replace the others.
    """

    low: Share = Field(default=0.0, description="a mean score of this or less is all wrong")
    high: Share = Field(default=1.0, description="a mean score of this or more is all right")
    score: str | None = Field(
        default=None, description="the reward that filters by its score; none: the only one that returns scores"
    )
    max_rounds: Rounds = Field(default=16, description="maximum rounds of sampling in one step, the first included")
    oversampling: Oversampling = Field(
        default=1.0, description="prompts drawn for each missing one; surplus ones are dropped"
    )
    when_short: Literal["train", "stop"] = Field(
        default="train", description="after the last round: train with fewer prompts, or fail"
    )

    @model_validator(mode="after")
    def _range(self) -> FilteringConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be less than high={self.high:g}")
        return self
