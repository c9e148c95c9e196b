"""SLiC's hinge loss on log-prob ratios, arXiv:2305.10425 and arXiv:2309.06657."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.preference_losses import HingeConfig
from rlhf_core.losses.preference.base import PairLogprobs
from rlhf_core.losses.preference.divergence import DifferenceLoss


class Hinge(DifferenceLoss[HingeConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        return (1 - self.difference(pairs)).relu()
