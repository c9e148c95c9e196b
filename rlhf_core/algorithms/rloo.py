"""RLOO: arXiv:2402.14740."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.rl.algorithms import RLOOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class RLOO(Algorithm):
    """Advantage: reward minus its completion's KL, minus the mean of the same over the prompt's other completions.
    Loss: PPO's clipped one, so that several updates per batch stay stable; without a mean over tokens.

    Models: policy, reference for the KL. OpenRLHF subtracts the KL token by token, after the baseline (kl_per_token),
    and takes the mean over tokens (aggregation: token).
    """

    config: RLOOConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        e = scored
        if not self.config.kl_per_token:
            whole = self._episode_rewards(e, rewards, kl_coefficient)
            return TrainingBatch(**vars(e), advantages=to_tokens(adv.leave_one_out(whole, group_ids), e))
        penalties = adv.discounted_returns(
            self._kl_rewards(e, kl_coefficient), e.loss_mask, e.sequence_lengths, gamma=1.0
        )
        advantages = to_tokens(adv.leave_one_out(rewards, group_ids), e) + penalties
        return TrainingBatch(**vars(e), advantages=torch.where(e.loss_mask, advantages, torch.zeros_like(advantages)))
