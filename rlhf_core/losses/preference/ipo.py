"""IPO: the difference of log-prob ratios is regressed to 1 / (2 beta), arXiv:2310.12036."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import IPOConfig
from rlhf_core.losses.preference.base import PairLogprobs, RatioLoss


class IPO(RatioLoss[IPOConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        ratios = self.ratios(pairs)
        return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * self.config.beta)).square()
