"""GMPO, geometric-mean policy optimisation: arXiv:2507.20673."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.losses.policy import geometric_mean_policy_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.types import Minibatch


@dataclass(frozen=True)
class GMPO(GRPO):
    """Advantage: GRPO's. Loss: the geometric mean of a completion's clipped ratios, a mean over completions. Models:
    policy.

    Without clips it is GSPO without clips. OpenRLHF has no GMPO.
    """

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        return geometric_mean_policy_loss(
            logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            batch.sequence_lengths, clip_low=self.config.clip_low, clip_high=self.config.clip_high,
        )  # fmt: skip
