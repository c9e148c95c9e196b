"""A preference loss: mean log-probs of tokens are to be `aim` apart."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rlhf_core.config.stages.preference_losses import PreferenceLossConfig, PreferenceLossEntry
from rlhf_core.losses.preference import PairLogprobs, PreferenceLoss


class ApartConfig(PreferenceLossConfig):
    type: Literal["apart"]
    aim: float = Field(default=1.0, gt=0, description="nats between the two")


class Apart(PreferenceLoss[ApartConfig]):
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return pairs.means

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = pairs.means.unbind(1)
        return (chosen - rejected - self.config.aim).square()


APART = PreferenceLossEntry(ApartConfig, "alignment_example.preference_loss:Apart")
