"""Settings of the stage that gives rewards to completions that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads, Role, operational
from rlhf_core.config.numbers import GroupSize, Tokens
from rlhf_core.config.rewards.rewards import CompletionReward
from rlhf_core.config.stages.base import JudgedBy, NamedStageConfig, ResumedConfig, SeededConfig
from rlhf_core.config.stages.sampled import RewardedConfig
from rlhf_core.config.texts import JudgeName

_INPUTS = ("dataset", "conversations", "pairs")  # one of which names the completions


class ScoreConfig(ResumedConfig, RewardedConfig, SeededConfig, NamedStageConfig):
    """Gives completions, or the last replies of conversations, rewards in place of those that they have. Either
    `dataset` or `conversations` names them. With `pairs` the result is an evaluation of the rewards: how often they
    prefer the chosen completion.
    """

    made_format: ClassVar[str] = "completions"

    dataset: Annotated[str | None, Reads("dataset", format="completions", only_read=True, optional=True)] = Field(
        default=None, description="a stage `generate`, or an entry of the recipe's `data`, format completions"
    )
    conversations: Annotated[str | None, Reads("dataset", format="conversations", only_read=True, optional=True)] = (
        Field(default=None, description="name of an entry of the recipe's `data`, format conversations")
    )
    pairs: Annotated[str | None, Reads("dataset", format="reward_bench", held_out=True, optional=True)] = Field(
        default=None,
        description="name of an entry of the recipe's `data`, format reward_bench: the rewards are evaluated on it",
    )
    prompts: Annotated[str | None, Reads("dataset", format="prompts", only_read=True, optional=True)] = Field(
        default=None,
        description="dataset of the same prompts, format prompts, with columns that rewards read, such as `answer`; "
        "none: rewards see the prompt and the completion alone",
    )
    rewards: dict[JudgeName, CompletionReward] = Field(
        min_length=1, description="name -> reward of each completion, and its weight in their sum, `reward`"
    )
    max_length: Tokens | None = Field(
        default=None, description="longest prompt with its completion, in tokens of each reward model"
    )
    rows_per_call: GroupSize = operational(256, description="prompts whose completions rewards of text get at a time")

    @property
    def makes(self) -> Role | None:
        return "dataset" if self.pairs is None else None

    @property
    def text_readers(self) -> tuple[str, ...]:
        """None: a reward model of text alone refuses rows with images."""
        return ()

    @property
    def rows_input(self) -> str:
        """The input that has the completions."""
        return next(name for name in _INPUTS if getattr(self, name) is not None)

    @property
    def prompts_of(self) -> str | None:
        return self.dataset or self.conversations

    @property
    def draws(self) -> bool:
        """Ranks of reward models seed their generators; so do intervals."""
        return bool(self.readers) or self.pairs is not None

    def judges(self) -> Iterator[JudgedBy]:
        own = "dataset" if self.dataset is not None else ""
        for name, reward in self.rewards.items():
            yield JudgedBy(f"rewards.{name}", reward, own if self.prompts is None else "prompts")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if sum(getattr(self, name) is not None for name in _INPUTS) != 1:
            raise ValueError(
                "name the completions by `dataset`, conversations by `conversations`, or pairs by `pairs`: one of them"
            )
        return self

    @model_validator(mode="after")
    def _length_is_of_reward_models(self) -> Self:
        if bool(self.model_rewards) != (self.max_length is not None):
            raise ValueError(
                "max_length is missing: set how many tokens a reward model reads at most"
                if self.max_length is None
                else "max_length is of what reward models read, and `rewards` has none of a model: remove it"
            )
        return self
