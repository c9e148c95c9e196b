"""DPPO, divergence PPO, with the binary total variation: arXiv:2602.04879."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.config.rl.algorithms import DPPOConfig
from rlhf_core.losses.policy import divergence_masked_policy_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.types import Minibatch


@dataclass(frozen=True)
class DPPO(GRPO):
    """Advantage: GRPO's. Loss: ratio to the engine's probability, masked by the difference of the two, a mean over
    completions of their means. Models: policy.

    The paper measures the divergence from the policy that sampled, which is the engine's, not the trainer's before the
    update: so the ratio corrects the mismatch of the two. OpenRLHF has no DPPO.
    """

    config: DPPOConfig

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        return divergence_masked_policy_loss(
            logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, max_ratio=self.config.max_ratio,
        )  # fmt: skip
