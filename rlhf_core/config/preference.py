"""Settings of preference learning."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Reads
from rlhf_core.config.preference_losses import PreferenceLossConfig
from rlhf_core.config.reference import ReferencedConfig
from rlhf_core.config.texts import JudgeName
from rlhf_core.config.validation import PairsValidation


class PreferenceConfig(ReferencedConfig):
    """Preference pairs, learned without a reward model: DPO and its kin. `batch_size` counts pairs."""

    dataset: Annotated[str, Reads("dataset", format="preferences")] = Field(
        description="name of an entry of the recipe's `data`, format preferences"
    )
    validation: PairsValidation | None = Field(
        default=None, description="held-out rows whose loss is measured while it trains; none: the last weights"
    )
    losses: dict[JudgeName, PreferenceLossConfig] = Field(
        min_length=1, description="name -> loss; their weighted sum is minimised, and the first one's rewards are shown"
    )

    @property
    def uses_reference(self) -> bool:
        return any(loss.uses_reference for loss in self.losses.values())
