"""Settings of language-model training: pre-training and SFT."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlhf_core.config.base import Reads, since_default
from rlhf_core.config.stages.base import RowLimit
from rlhf_core.config.stages.trained import LoraConfig, SupervisedPolicyConfig
from rlhf_core.config.stages.validation import ConversationsValidation, TextValidation


def _dataset(data_format: str) -> Any:
    return Field(description=f"name of an entry of the recipe's `data`, format {data_format}")


def _validation() -> Any:
    return Field(
        default=None, description="validation on held-out rows during training; none: the result is the last weights"
    )


class PretrainConfig(SupervisedPolicyConfig):
    """Plain text, every token trained, documents cut into sequences of `max_length`."""

    dataset: Annotated[str, Reads("dataset", format="text")] = _dataset("text")
    validation: TextValidation | None = _validation()
    lora: LoraConfig | None = since_default(None, description="train an adapter; none: all weights")

    def row_limit(self, dataset: str) -> RowLimit | None:
        return RowLimit("max_length", self.max_length, splits=True)


class SFTConfig(SupervisedPolicyConfig):
    """Conversations; only the tokens of assistant turns are trained."""

    dataset: Annotated[str, Reads("dataset", format="conversations")] = _dataset("conversations")
    validation: ConversationsValidation | None = _validation()
