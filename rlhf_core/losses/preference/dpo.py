"""DPO, arXiv:2305.18290; with label smoothing, conservative DPO."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import DPOConfig
from rlhf_core.losses.preference.base import PairLogprobs
from rlhf_core.losses.preference.divergence import DifferenceLoss


class DPO(DifferenceLoss[DPOConfig]):
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        difference, wrong = self.difference(pairs), self.config.label_smoothing
        return -(1 - wrong) * logsigmoid(difference) - wrong * logsigmoid(-difference)
