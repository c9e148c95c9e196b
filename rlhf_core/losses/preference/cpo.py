"""CPO: DPO's loss with a uniform reference, plus the chosen completion's likelihood, arXiv:2401.08417."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import CPOConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss


class CPO(PreferenceLoss[CPOConfig]):
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return self.config.beta * pairs.logprobs

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        chosen, rejected = self.rewards(pairs).unbind(1)
        return -logsigmoid(chosen - rejected) - pairs.means[:, 0]
