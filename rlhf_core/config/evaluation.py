"""pass@1 (greedy) and pass@k (unbiased) of one model on held-out prompts."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, NonNegativeInt, PositiveInt, operational
from rlhf_core.config.rewards import ScorerConfig
from rlhf_core.config.rollout import RolloutEngineConfig, SamplingConfig


class EvaluationConfig(Config):
    dataset: str = Field(description="name of an entry of the recipe's `data`, format prompts")
    scorers: dict[str, ScorerConfig] = Field(min_length=1, description="name -> 0-1 score; the first is the main one")
    sampling: SamplingConfig = Field(description="of the sampled completions; pass@1 is greedy")
    samples: NonNegativeInt = Field(
        default=8, description="sampled completions of each prompt, for pass@k; 0: greedy only"
    )
    pass_at: tuple[PositiveInt, ...] = Field(default=(1, 8), description="each k of pass@k")
    models: tuple[str, ...] = operational(("base", "sft", "rl"), description="stages whose models are compared")
    rollout: RolloutEngineConfig = Field(description="the engines that answer")

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationConfig:
        largest = max(self.pass_at, default=1)
        if largest > 1 and largest > self.samples:
            raise ValueError(
                f"pass@{largest} needs at least {largest} samples of each prompt, but samples is {self.samples}"
            )
        return self
