"""ORPO: the chosen completion's likelihood and the ratio of the odds of both, without a reference, arXiv:2403.07691."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import ORPOConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss

_MOST_CERTAIN = -1e-6  # a mean log-prob above it: odds of more than a million, that may be infinite in float32


class ORPO(PreferenceLoss[ORPOConfig]):
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return self.config.beta * pairs.means

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        means = pairs.means.clamp(max=_MOST_CERTAIN)
        log_odds = means - torch.log(-torch.expm1(means))
        return -pairs.means[:, 0] - self.config.beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])
