"""Held-out prompts that are answered while RL trains, and which of the weights come out of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, NonNegativeInt, PositiveInt, Reads
from rlhf_core.config.rewards import ScorerConfig
from rlhf_core.config.rollout import SamplingConfig


class ValidationConfig(Config):
    """Scored as in `evaluation`, by the engines that sample, with the weights that were published last."""

    dataset: Annotated[str, Reads("dataset", format="prompts", held_out=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    every_steps: PositiveInt = Field(description="steps between two validations; the last step is validated too")
    scorers: dict[str, ScorerConfig] = Field(min_length=1, description="name -> 0-1 score; the first is the main one")
    samples: NonNegativeInt = Field(
        default=0, description="sampled completions of each prompt, besides the greedy one; 0: greedy only"
    )
    sampling: SamplingConfig | None = Field(
        default=None, description="of the sampled completions, and `max_tokens` of all; none: as in the rollouts"
    )
    metric: str = Field(
        default="mean_score",
        description="the metric to maximise: `mean_score` or `pass@1` of greedy completions, "
        "`sampled_mean_score`, `sampled_pass@1` or, with N samples, `pass@N`; of another than the main scorer, "
        "`SCORER/…`",
    )
    keep: Literal["best", "last"] = Field(
        default="best", description="the stage's result: the weights that were validated best, or the last ones"
    )

    @property
    def pass_at(self) -> tuple[int, ...]:
        return (1, self.samples) if self.samples > 1 else (1,)

    @model_validator(mode="after")
    def _metric_is_measured(self) -> ValidationConfig:
        names = ["mean_score", *(f"pass@{k}" for k in self.pass_at)]
        if self.samples:
            names += ["sampled_mean_score", "sampled_pass@1"]
        others = list(self.scorers)[1:]
        known = [*names, *(f"{scorer}/{name}" for scorer in others for name in names)]
        if self.metric not in known:
            raise ValueError(f"validation.metric is `{self.metric}`; these settings measure {', '.join(known)}")
        return self
