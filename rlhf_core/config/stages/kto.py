"""Settings of KTO."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads
from rlhf_core.config.numbers import Coefficient, PreferenceBeta
from rlhf_core.config.stages.reference_model import ReferencedConfig
from rlhf_core.config.stages.validation import UnpairedValidation


class KTOConfig(ReferencedConfig):
    """Kahneman-Tversky optimisation, arXiv:2402.01306: completions labelled good or bad, without pairs.

    With r = log p - log p_reference of a completion and z the KL of policy and reference: desirable_weight x (1 -
    sigmoid(beta (r - z))) for a good completion, undesirable_weight x (1 - sigmoid(beta (z - r))) for a bad one. z is
    estimated over the whole step, on its prompts with completions of other rows, and never negative.
    """

    SMALLEST_STEP: ClassVar[int] = 2  # the KL is estimated with completions of other rows

    dataset: Annotated[str, Reads("dataset", format="unpaired")] = Field(
        description="name of an entry of the recipe's `data`, format unpaired"
    )
    validation: UnpairedValidation | None = Field(
        default=None, description="validation on held-out rows during training; none: the result is the last weights"
    )
    beta: PreferenceBeta = Field(default=0.1, description="strength of the regularisation towards the reference")
    desirable_weight: Coefficient = Field(default=1.0, description="weight of the loss of good completions")
    undesirable_weight: Coefficient = Field(
        default=1.0,
        description="weight of the loss of bad ones; the paper keeps desirable_weight x good rows between 1 and 4/3 "
        "of undesirable_weight x bad rows",
    )

    def one_label(self, label: float) -> str:
        return (
            f"every row has the label {str(bool(label)).lower()}: KTO learns what tells good completions from bad "
            "ones; add rows of the other label, or use SFT where all are good"
        )

    @property
    def uses_reference(self) -> bool:
        return True

    @model_validator(mode="after")
    def _batch_has_other_completions(self) -> Self:
        if self.batch_size < self.SMALLEST_STEP:
            raise ValueError(
                "batch_size is 1, but the KL is estimated with the completions of other rows: set 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be trained")
        return self
