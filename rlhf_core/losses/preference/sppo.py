"""SPPO with hard labels: each log-prob ratio is regressed to its side's 1 / (2 beta), arXiv:2405.00675."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import SPPOConfig
from rlhf_core.losses.preference.base import PairLogprobs, RatioLoss


class SPPO(RatioLoss[SPPOConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = self.ratios(pairs).unbind(1)
        aim = 1 / (2 * self.config.beta)
        return (chosen - aim).square() + (rejected + aim).square()
