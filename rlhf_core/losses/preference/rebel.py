"""REBEL: the difference of log-prob ratios is regressed to that of the rewards, Algorithm 1 of arXiv:2404.16767."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import REBELConfig
from rlhf_core.losses.preference.base import PairLogprobs, RatioLoss


class REBEL(RatioLoss[REBELConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        assert pairs.margins is not None
        rewards = self.rewards(pairs)
        return (rewards[:, 0] - rewards[:, 1] - pairs.margins).square()
