"""DPO that is unbiased under labels with a known error rate, arXiv:2403.00409."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import RobustDPOConfig
from rlhf_core.losses.preference.base import PairLogprobs
from rlhf_core.losses.preference.divergence import DifferenceLoss


class RobustDPO(DifferenceLoss[RobustDPOConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        difference, wrong = self.difference(pairs), self.config.label_smoothing
        return (-(1 - wrong) * logsigmoid(difference) + wrong * logsigmoid(-difference)) / (1 - 2 * wrong)
