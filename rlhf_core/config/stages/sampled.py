"""Settings of sampling as a stage, and of datasets made of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Config, Reads, Role, operational, since_default
from rlhf_core.config.engines.placement import Placement, Reservation
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import Decimals, GroupSize, Reward, RewardGap
from rlhf_core.config.rewards.judges import PairJudgeConfig
from rlhf_core.config.rewards.rewards import CompletionReward, ModelReward, TextReward
from rlhf_core.config.stages.base import (
    EnginesConfig,
    HeldModel,
    JudgedBy,
    NamedStageConfig,
    ResumedConfig,
    StageConfig,
)
from rlhf_core.config.stages.trained import require_devices
from rlhf_core.config.texts import JudgeName


class RewardedConfig(StageConfig):
    """Rewards of completions: of their text in the job's process, then of reward models, one model at a time."""

    rewards: dict[JudgeName, CompletionReward] = Field(
        default={}, description="rewards by name, each with its weight in the sum, `reward`"
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), description="engine of the models that read the completions, such as reward models"
    )
    placement: Placement = operational(Placement, description="resources of these models' workers, one model at a time")

    @property
    def text_rewards(self) -> dict[str, TextReward]:
        """The subset of `rewards` that need only the text of completions."""
        return {name: reward for name, reward in self.rewards.items() if isinstance(reward, TextReward)}

    @property
    def model_rewards(self) -> dict[str, ModelReward]:
        """The subset of `rewards` computed by reward models."""
        return {name: reward for name, reward in self.rewards.items() if isinstance(reward, ModelReward)}

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward in their sum, by name."""
        return {name: reward.weight for name, reward in self.rewards.items()}

    @property
    def text_readers(self) -> tuple[str, ...]:
        """Reward models, which are trained on text only."""
        return tuple(f"rewards.{name}" for name in self.model_rewards)

    @property
    def readers(self) -> Mapping[str, tuple[EngineConfig, Placement]]:
        """Engine and placement of each model that reads the completions, by its setting."""
        return {
            f"rewards.{name}": (reward.engine or self.engine, reward.placement or self.placement)
            for name, reward in self.model_rewards.items()
        }

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        """One model at a time."""
        run = self.readers.items()
        return [(HeldModel(f"{name}.model", engine, placement),) for name, (engine, placement) in run]

    def reserves(self) -> Reservation:
        """The maximum, not the sum: engines end before a model reads, and each model before the next."""
        return reduce(or_, (placement.reserves() for _, placement in self.readers.values()), super().reserves())

    def unused_fields(self) -> frozenset[str]:
        return super().unused_fields() | (set() if self.readers else {"engine"})

    @model_validator(mode="after")
    def _every_completion_has_a_reward(self) -> Self:
        for name, reward in self.rewards.items():
            if isinstance(reward, TextReward) and reward.tolerated_failures:
                raise ValueError(f"rewards.{name}: every completion needs its reward: remove `tolerated_failures`")
        return self

    @model_validator(mode="after")
    def _models_read_one_at_a_time(self) -> Self:
        for name, reward in self.model_rewards.items():
            shared = reward.placement is not None and reward.placement.group is not None
            setting = "placement.group" if shared else "offload" if reward.offload else None
            if setting is not None:
                raise ValueError(
                    f"rewards.{name}.{setting} is for models that are loaded together, in RL, and here each reads "
                    "after the other; remove it"
                )
        return self

    @model_validator(mode="after")
    def _readers_are_there(self) -> Self:
        changed = {"engine": self.engine != EngineConfig(), "placement": self.placement != Placement()}
        setting = next((name for name, is_set in changed.items() if is_set), None)
        if not self.readers and setting is not None:
            raise ValueError(
                f"{setting} is for models that read the completions, but there is no reward of a reward model, and no "
                "other reader: remove it"
            )
        for engine, placement in self.readers.values():
            require_devices(engine, placement)
        return self


class ComparedConfig(Config):
    model: Annotated[str, Reads("model")] = Field(description="stage of the model")


class GenerateConfig(ResumedConfig, RewardedConfig, EnginesConfig):
    """Samples completions of every prompt of a dataset, with log-probs and rewards, as a dataset of its own."""

    made_format: ClassVar[str] = "completions"

    dataset: Annotated[str, Reads("dataset", format="prompts", only_read=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the model that samples; none: the last one above that makes a model"
    )
    samples: GroupSize = Field(default=8, description="completions per prompt")
    reference: ComparedConfig | None = since_default(
        None, description="reference model of the completions' KL; none: not measured"
    )
    keep_tokens: bool = Field(default=False, description="write the log-prob of each token beside the tokens")
    prompts_per_call: GroupSize = operational(256, description="number of prompts sent to the engines at a time")

    @property
    def makes(self) -> Role:
        return "dataset"

    @property
    def prompts_of(self) -> str:
        return self.dataset

    @property
    def readers(self) -> Mapping[str, tuple[EngineConfig, Placement]]:
        run = super().readers
        return run if self.reference is None else {**run, "reference": (self.engine, self.placement)}

    @property
    def token_readers(self) -> Mapping[str, tuple[str, str]]:
        read = self.reference is not None
        return {"reference.model": ("reference.model", "name another model, or remove it")} if read else {}

    def judges(self) -> Iterator[JudgedBy]:
        for name, reward in self.rewards.items():
            yield JudgedBy(f"rewards.{name}", reward, "dataset")

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"sampling.temperature is 0, so all {self.samples} completions of a prompt would be alike; set a "
                "temperature such as 1.0, or samples: 1"
            )
        return self

    @model_validator(mode="after")
    def _kl_is_of_the_model(self) -> Self:
        other = "temperature" if self.sampling.temperature != 1 else next(iter(self.sampling.truncation), None)
        if self.reference is not None and other is not None:
            raise ValueError(
                f"reference: the KL of a model is measured on samples of the model itself, but sampling.{other} makes "
                "them those of another distribution: remove it, or measure the KL in another stage `generate`"
            )
        return self


class _FromDataset(NamedStageConfig):
    """Makes a dataset from another, its `dataset`, which each subclass declares with its format."""

    dataset: str

    @property
    def makes(self) -> Role:
        return "dataset"

    @property
    def prompts_of(self) -> str:
        return self.dataset


class FromCompletions(_FromDataset):
    dataset: Annotated[str, Reads("dataset", format="completions", only_read=True)] = Field(
        description="a stage `generate`, or an entry of the recipe's `data`, format completions"
    )
    drop_truncated: bool = Field(
        default=False,
        description="drop completions truncated at `max_tokens`; else they are used, without training an end",
    )

    @property
    def reads_rewards(self) -> bool:
        """True if each completion needs a reward."""
        return True


class PairsConfig(FromCompletions):
    """Preference pairs made from completions with rewards. Equal texts count once; empty ones are dropped."""

    made_format: ClassVar[str] = "preferences"

    select: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="one pair per prompt, of the highest and the lowest reward; or all pairs, which with `judge` need "
        "no rewards",
    )
    margin: RewardGap = Field(default=0.0, description="minimum difference of two rewards, exclusive")
    write_margin: bool = since_default(
        False,
        description="write the difference of the two rewards as the column `margin`, for losses such as `rebel` and a "
        "stage `reward_model`",
    )
    judge: PairJudgeConfig | None = Field(
        default=None, description="a model that chooses the better of a pair; none: by the rewards"
    )

    @property
    def reads_rewards(self) -> bool:
        return self.judge is None or self.select == "best_worst"

    @property
    def text_readers(self) -> tuple[str, ...]:
        """The judge, which reads text only: it would compare answers about an image without seeing it."""
        return () if self.judge is None else ("judge",)

    @model_validator(mode="after")
    def _one_decides(self) -> Self:
        if self.judge is not None and self.margin:
            raise ValueError("with `judge` the rewards do not decide: remove `margin`")
        if self.judge is not None and self.write_margin:
            raise ValueError("with `judge` the rewards do not decide: remove `write_margin`")
        return self


class UnpairedConfig(FromCompletions):
    """Completions labelled by their rewards, for KTO. Equal texts count once; empty ones are dropped."""

    made_format: ClassVar[str] = "unpaired"

    threshold: Reward = Field(description="minimum reward of good completions; those below are bad")
    margin: RewardGap = Field(default=0.0, description="completions with a reward closer to the threshold are dropped")


class BestOfNConfig(FromCompletions):
    """The completion of each prompt with the highest reward, as a conversation: rejection sampling."""

    made_format: ClassVar[str] = "conversations"

    least_reward: Reward | None = Field(
        default=None, description="minimum reward of the best completion; prompts below are dropped; none: all are kept"
    )


REWARD_PLACE = "{reward}"


def _has_one_place(text: str) -> str:
    if text.count(REWARD_PLACE) != 1:
        raise ValueError(f"{text[:80]!r} must have {REWARD_PLACE} once: the reward is written there")
    return text


class _Condition(Config):
    """The text form of a reward in a prompt, the same for training and for sampling."""

    text: Annotated[str, AfterValidator(_has_one_place)] = Field(
        default=f"\nReward: {REWARD_PLACE}",
        description=f"text appended to the last message of the user; the reward replaces {REWARD_PLACE}",
    )
    decimals: Decimals = Field(default=1, description="decimals of the reward in the text")


class ConditionalConfig(FromCompletions, _Condition):
    """Each completion as a conversation whose prompt contains its reward, for conditional SFT."""

    made_format: ClassVar[str] = "conversations"


class ConditionalPromptsConfig(_FromDataset, _Condition):
    """Prompts for a model trained by conditional SFT, all with one reward."""

    made_format: ClassVar[str] = "prompts"

    dataset: Annotated[str, Reads("dataset", format="prompts", only_read=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    reward: Reward = Field(description="reward in the prompts, usually the highest of the training data")
