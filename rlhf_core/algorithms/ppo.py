"""PPO with a critic (arXiv:1707.06347, with the per-token KL reward of arXiv:2203.02155)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.algorithms.base import Metrics
from rlhf_core.config.algorithms import PPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.losses import kl
from rlhf_core.losses.masking import masked_sum
from rlhf_core.losses.policy import clipped_policy_loss
from rlhf_core.types import Experience


@dataclass(frozen=True, slots=True)
class PPO:
    config: PPOConfig
    uses_critic: bool = True

    @property
    def kl_in_reward(self) -> bool:
        return self.config.kl.coefficient > 0

    def advantages(self, experience: Experience, rewards: Tensor, group_ids: Tensor) -> Experience:
        """GAE (arXiv:1506.02438) over r_t = -beta KL_t, plus the sequence's reward on its last sampled token."""
        e, mask = experience, experience.loss_mask
        assert e.values is not None
        token_rewards = torch.zeros_like(e.values)
        if self.kl_in_reward:
            assert e.old_logprobs is not None
            assert e.ref_logprobs is not None
            divergence = kl.estimate(e.old_logprobs, e.ref_logprobs, self.config.kl.estimator)
            token_rewards = torch.where(mask, -self.config.kl.coefficient * divergence, token_rewards)
        token_rewards[last_trained_token(e)] += rewards
        advantages, returns = adv.gae(
            token_rewards, e.values, mask, e.sequence_lengths, gamma=self.config.gamma, lam=self.config.gae_lambda
        )
        return replace(e, rewards=token_rewards, advantages=adv.whiten(advantages, mask), returns=returns)

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor | None, experience: Experience, num_tokens: int
    ) -> tuple[Tensor, Metrics]:
        assert experience.advantages is not None
        old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
        loss, metrics = clipped_policy_loss(
            logprobs, old, experience.advantages, experience.loss_mask,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, num_tokens=num_tokens,
        )  # fmt: skip
        return with_entropy_bonus(
            loss, entropy, experience.loss_mask, self.config.entropy_coefficient, num_tokens
        ), metrics


def last_trained_token(experience: Experience) -> Tensor:
    """(S,) int64: index of the last sampled token of each sequence."""
    index = torch.arange(experience.num_tokens).masked_fill(~experience.loss_mask, -1)
    last = torch.full((experience.num_sequences,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, experience.sequence_ids, index, reduce="amax")
    if bool((last < 0).any()):
        raise ValueError("a trajectory without a sampled token cannot carry a reward")
    return last


def with_entropy_bonus(
    loss: Tensor, entropy: Tensor | None, mask: Tensor, coefficient: float, num_tokens: int
) -> Tensor:
    """`loss` minus coefficient x mean entropy of the trained tokens."""
    if entropy is None or coefficient == 0:
        return loss
    return loss - coefficient * masked_sum(entropy, mask) / num_tokens
