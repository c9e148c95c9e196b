"""Settings of sampling as a stage, and of what is made of the samples: pairs, labelled rows, and the best ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads, Role, operational
from rlhf_core.config.numbers import GroupSize, Reward, RewardGap
from rlhf_core.config.rewards import TextReward
from rlhf_core.config.rollout import require_different
from rlhf_core.config.stage import EnginesConfig, JudgedBy, NamedStageConfig
from rlhf_core.config.texts import JudgeName


class GenerateConfig(EnginesConfig):
    """Samples completions of every prompt of a dataset, with log-probs and rewards, as a dataset of its own."""

    made_format: ClassVar[str] = "completions"

    dataset: Annotated[str, Reads("dataset", format="prompts")] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="the stage whose model samples; none: the last one above that makes a model"
    )
    samples: GroupSize = Field(default=8, description="completions of each prompt")
    rewards: dict[JudgeName, TextReward] = Field(
        default={}, description="name -> reward of each completion, and its weight in their sum, `reward`"
    )
    prompts_per_call: GroupSize = operational(256, description="prompts that the engines are given at a time")

    @property
    def makes(self) -> Role:
        return "dataset"

    def judges(self) -> Iterator[JudgedBy]:
        for name, reward in self.rewards.items():
            yield JudgedBy(f"rewards.{name}", reward, "dataset")

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        require_different(self.samples - 1, self.sampling)
        return self

    @model_validator(mode="after")
    def _every_completion_has_a_reward(self) -> Self:
        for name, reward in self.rewards.items():
            if reward.tolerated_failures:
                raise ValueError(f"rewards.{name}: every completion needs its reward: leave `tolerated_failures` out")
        return self


class _FromCompletions(NamedStageConfig):
    dataset: Annotated[str, Reads("dataset", format="completions")] = Field(
        description="a stage `generate`, or an entry of the recipe's `data`, format completions"
    )

    @property
    def makes(self) -> Role:
        return "dataset"


class PairsConfig(_FromCompletions):
    """Preference pairs out of completions with rewards. Equal texts count once; empty ones are left out."""

    made_format: ClassVar[str] = "preferences"

    select: Literal["best_worst", "all"] = Field(
        default="best_worst", description="one pair a prompt, of the highest and the lowest reward; or all pairs"
    )
    margin: RewardGap = Field(default=0.0, description="two rewards must be further apart than this")


class UnpairedConfig(_FromCompletions):
    """Completions labelled by their rewards, for KTO. Equal texts count once; empty ones are left out."""

    made_format: ClassVar[str] = "unpaired"

    threshold: Reward = Field(description="completions of this reward or more are good, those of less are bad")
    margin: RewardGap = Field(default=0.0, description="rewards that are closer to the threshold are left out")


class BestOfNConfig(_FromCompletions):
    """The completion of each prompt with the highest reward, as a conversation: rejection sampling."""

    made_format: ClassVar[str] = "conversations"

    least_reward: Reward | None = Field(
        default=None, description="prompts whose best has less are left out; none: all are kept"
    )
