"""GRPO: arXiv:2402.03300."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.algorithms import GRPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Experience


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Advantage: (reward - mean of its group) / deviation of its group; with rewards of steps, theirs is added. Loss:
    clipped, a mean over completions of their means, and the KL's k3.

    Models: policy, reference for the KL. OpenRLHF takes the mean over tokens (aggregation: token).
    """

    divide_by_std: ClassVar[bool] = True

    config: GRPOConfig

    def _advantages(
        self, experience: Experience, rewards: Tensor, group_ids: Tensor, kl_coefficient: float
    ) -> Experience:
        e = experience
        whole = self._sequence_rewards(e, rewards, kl_coefficient)
        advantages = to_tokens(adv.group_normalised(whole, group_ids, divide_by_std=self.divide_by_std), e)
        if e.process_rewards is not None:
            assert e.step_ends is not None
            advantages = advantages + adv.process_advantages(
                e.process_rewards, e.step_ends, group_ids, e.loss_mask, e.sequence_lengths,
                divide_by_std=self.divide_by_std,
            )  # fmt: skip
        return replace(e, advantages=advantages)
