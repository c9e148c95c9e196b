"""Anchored preference optimisation, arXiv:2408.06266: trains the direction of each reward, not only their order."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import APODownConfig, APOZeroConfig
from rlhf_core.losses.preference.base import PairLogprobs, RatioLoss


class APOZero(RatioLoss[APOZeroConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = self.rewards(pairs).unbind(1)
        return 1 - chosen.sigmoid() + rejected.sigmoid()


class APODown(RatioLoss[APODownConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = self.rewards(pairs).unbind(1)
        return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()
