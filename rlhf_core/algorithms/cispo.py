"""CISPO: arXiv:2506.13585."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.losses.policy import cispo_policy_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.types import Minibatch


@dataclass(frozen=True)
class CISPO(GRPO):
    """Advantage: GRPO's. Loss: log-probs weighted by a clipped ratio without gradient, a mean over tokens, no KL.
    Models: policy.

    OpenRLHF has no CISPO. The paper bounds the ratio from above only and does not print its bound; 5, the default, is
    within the range in which arXiv:2510.13786 found no difference.
    """

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        return cispo_policy_loss(
            logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high,
        )  # fmt: skip
