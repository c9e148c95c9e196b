"""Settings of the stages that store a frozen model's log-probs of a dataset, for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Reads, Role
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import DistillationTemperature, StoredTokens, TrainedTokens
from rlhf_core.config.stages.base import HeldModel, ResumedConfig
from rlhf_core.config.stages.trained import RanksConfig


class ReadingConfig(ResumedConfig, RanksConfig):
    """A forward pass of a model over a dataset; each subclass declares the dataset with its format."""

    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the model that reads them; none: the last one above that makes a model"
    )
    max_length: TrainedTokens = Field(
        description="maximum sequence length in tokens, as in the stage that reads the result"
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), description="engine settings, best those of the stage that reads the result"
    )

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        return ((HeldModel("model", self.engine, self.placement),),)


class LogprobsConfig(ReadingConfig):
    """Log-probs of both completions of each preference pair, computed once, for stages that use them as reference, and
    how often the model prefers the chosen one.
    """

    dataset: Annotated[str, Reads("dataset", format="preferences", only_read=True)] = Field(
        description="name of an entry of the recipe's `data`, format preferences"
    )
    reference: Annotated[str | None, Reads("logprobs", optional=True)] = Field(
        default=None,
        description="another stage `logprobs` on the same pairs, to compare the model with; none: no comparison",
    )

    @property
    def makes(self) -> Role:
        return "logprobs"


class TopLogprobsConfig(ReadingConfig):
    """The most probable tokens at each trained token of conversations, with their log-probs, computed once, for
    distillation.
    """

    dataset: Annotated[str, Reads("dataset", format="conversations", only_read=True)] = Field(
        description="name of an entry of the recipe's `data`, format conversations"
    )
    k: StoredTokens = Field(
        default=64, description="number of tokens at each position; all, if the vocabulary has no more"
    )
    temperature: DistillationTemperature = Field(
        default=1.0, description="temperature of the distribution, and of its student's"
    )

    @property
    def makes(self) -> Role:
        return "top_logprobs"
