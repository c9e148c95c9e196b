"""Negative log-likelihood of chosen completions, added to another loss."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import NLLConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss


class NLL(PreferenceLoss[NLLConfig]):
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return pairs.means

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        return -pairs.means[:, 0]
