"""GSPO: arXiv:2507.18071."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.losses.policy import sequence_policy_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.types import Minibatch


@dataclass(frozen=True)
class GSPO(GRPO):
    """Advantage: GRPO's. Loss: clipped, with one ratio per completion, a mean over completions. Models: policy.

    OpenRLHF's form is the paper's, with an exponent that is not bounded.
    """

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        return sequence_policy_loss(
            logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            batch.sequence_lengths, clip_low=self.config.clip_low, clip_high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
        )  # fmt: skip
