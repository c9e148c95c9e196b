"""SimPO: mean log-probs, a target margin and no reference, arXiv:2405.14734."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import SimPOConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss


class SimPO(PreferenceLoss[SimPOConfig]):
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return self.config.beta * pairs.means

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = self.rewards(pairs).unbind(1)
        return -logsigmoid(chosen - rejected - self.config.margin)
