"""EXO on pairs: the reverse KL from smoothed labels to the softmax of the two rewards, arXiv:2402.00856."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import EXOConfig
from rlhf_core.losses.preference.base import PairLogprobs
from rlhf_core.losses.preference.divergence import DifferenceLoss


class EXO(DifferenceLoss[EXOConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        difference, wrong = self.difference(pairs), self.config.label_smoothing
        chosen, rejected = logsigmoid(difference), logsigmoid(-difference)
        return chosen.exp() * (chosen - math.log1p(-wrong)) + rejected.exp() * (rejected - math.log(wrong))
