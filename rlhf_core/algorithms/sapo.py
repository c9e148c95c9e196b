"""SAPO, soft adaptive policy optimisation: arXiv:2511.20347."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.config.rl.algorithms import SAPOConfig
from rlhf_core.losses.policy import soft_gated_policy_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.types import Minibatch


@dataclass(frozen=True)
class SAPO(GRPO):
    """Advantage: GRPO's. Loss: a sigmoid of the ratio in place of its clips, a mean over completions of their means.
    Models: policy.

    With temperatures near 0 it is GRPO without clips. OpenRLHF has no SAPO.
    """

    config: SAPOConfig

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        return soft_gated_policy_loss(
            logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            temperature_positive=self.config.temperature_positive,
            temperature_negative=self.config.temperature_negative,
        )  # fmt: skip
