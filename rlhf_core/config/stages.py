"""The stages' own settings: pre-training, SFT, reward model, merge, an existing artifact, report."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from rlhf_core.config.base import Reads, Role, operational
from rlhf_core.config.data import OnOverlap
from rlhf_core.config.numbers import Coefficient, ShownPrompts
from rlhf_core.config.stage import NamedStageConfig, RowLimit, StageConfig
from rlhf_core.config.texts import NonEmpty
from rlhf_core.config.training import LoraConfig, SupervisedConfig, SupervisedPolicyConfig
from rlhf_core.config.validation import ConversationsValidation, PairsValidation, TextValidation

# Of a model in bfloat16, a merge has the weights in float32 and, while it saves, in bfloat16 again.
MERGE_COPIES = 4.0


def _dataset(data_format: str) -> Any:
    return Field(description=f"name of an entry of the recipe's `data`, format {data_format}")


def _validation(unless: str = "the last weights") -> Any:
    return Field(default=None, description=f"held-out rows whose loss is measured while it trains; none: {unless}")


class PretrainConfig(SupervisedConfig):
    """Plain text, every token trained, documents cut into sequences of `max_length`."""

    dataset: Annotated[str, Reads("dataset", format="text")] = _dataset("text")
    validation: TextValidation | None = _validation()

    @property
    def makes(self) -> Role:
        return "model"

    def row_limit(self, dataset: str) -> RowLimit | None:
        return RowLimit("max_length", self.max_length, splits=True)


class SFTConfig(SupervisedPolicyConfig):
    """Conversations; only the tokens of assistant turns are trained."""

    dataset: Annotated[str, Reads("dataset", format="conversations")] = _dataset("conversations")
    validation: ConversationsValidation | None = _validation()


def held_out_pairs(pairs: int) -> int:
    """How many of the pairs a reward model without `validation` is judged by: 5 %, at least 1 and at most 2000, which
    are enough to know the accuracy to a percent."""
    return max(1, math.ceil(min(0.05 * pairs, 2000)))


class RewardModelConfig(SupervisedConfig):
    """Preference pairs, Bradley-Terry: -log sigmoid of the difference of rewards, which is also known as logexp.

    `batch_size` counts pairs.
    """

    dataset: Annotated[str, Reads("dataset", format="preferences")] = _dataset("preferences")
    validation: PairsValidation | None = _validation(
        "the last weights, judged by 5 % of the pairs, held out; else all pairs of the dataset are trained on, and "
        "rewards are normalised by those of the held-out ones"
    )
    language_model_coefficient: Coefficient = Field(
        default=0.0, description="weight of the language-model loss on chosen completions"
    )
    lora: LoraConfig | None = Field(default=None, description="train an adapter, merged at the end; none: all weights")

    @property
    def makes(self) -> Role:
        return "reward_model"

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora

    @property
    def input_copies(self) -> float:
        return MERGE_COPIES if self.lora is not None else 0.0


class MergeConfig(NamedStageConfig):
    """Folds an adapter into the model that it was trained on."""

    adapter: Annotated[str, Reads("adapter")] = Field(description="the stage that trained the adapter")
    model: Annotated[str | None, Reads("model", of="adapter")] = Field(
        default=None, description="the stage whose model it is folded into; none: the one that it was trained on"
    )

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def input_copies(self) -> float:
        return MERGE_COPIES


class ArtifactConfig(NamedStageConfig):
    """An artifact that exists already. It is looked up when the run is planned; nothing is computed."""

    ref: NonEmpty = Field(
        description="stage/key as `alignment artifacts` prints it (some digits of the key suffice), or an alias: "
        "`model/alias`, or `alias` where only one model has it"
    )
    on_overlap: OnOverlap = operational(
        "error", description="where it is a dataset: of a row that is trained on and has a prompt that is evaluated on"
    )


class ReportConfig(StageConfig):
    title: str = Field(default="", description="of the page; empty: `Alignment run`, and the recipe's name")
    samples: ShownPrompts = Field(default=12, description="prompts whose answers are shown, before and after")
