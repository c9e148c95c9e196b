"""Settings of preference learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads
from rlhf_core.config.stages.preference_losses import PreferenceLossConfig
from rlhf_core.config.stages.reference_model import PairReferenceConfig, ReferencedConfig
from rlhf_core.config.stages.validation import PairsValidation
from rlhf_core.config.texts import JudgeName
from rlhf_core.errors import ConversationError


class PreferenceConfig(ReferencedConfig):
    """Direct preference learning on pairs, without a reward model: DPO and its variants. `batch_size` counts pairs."""

    dataset: Annotated[str, Reads("dataset", format="preferences")] = Field(
        description="name of an entry of the recipe's `data`, format preferences"
    )
    validation: PairsValidation | None = Field(
        default=None, description="validation on held-out rows during training; none: the result is the last weights"
    )
    losses: dict[JudgeName, PreferenceLossConfig] = Field(
        min_length=1,
        description="losses by name; their weighted sum is minimised, and the first one's rewards reported",
    )
    reference: PairReferenceConfig = Field(default=PairReferenceConfig(), description="the reference of the loss")

    @property
    def uses_reference(self) -> bool:
        return any(loss.uses_reference for loss in self.losses.values())

    @property
    def margin_losses(self) -> tuple[str, ...]:
        """Names of the losses that read the `margin` of rows."""
        return tuple(name for name, loss in self.losses.items() if loss.reads_margin)

    def as_read(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.margin_losses and row.get("margin") is None:
            raise ConversationError(
                f"losses.{self.margin_losses[0]} reads how much better the chosen completion is, and the row has no "
                "`margin`: add the column, or let a stage `pairs` write it (`write_margin`)"
            )
        return row

    @property
    def runs_reference(self) -> bool:
        return self.uses_reference and not self.reference.logprobs

    @model_validator(mode="after")
    def _reference_is_one(self) -> Self:
        run_here = {"model": None, "engine": None, "offload": False}
        changed = [name for name, default in run_here.items() if getattr(self.reference, name) != default]
        if self.reference.logprobs and changed:
            raise ValueError(
                f"reference.{changed[0]} is for a reference that is run here, and reference.logprobs for one that was "
                "run before; remove one of them"
            )
        return self
