"""GRPO (arXiv:2402.03300): no critic; advantages are normalised within the completions of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rlhf_core.algorithms.base import Metrics
from rlhf_core.algorithms.ppo import with_entropy_bonus
from rlhf_core.config.algorithms import GRPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.losses import kl
from rlhf_core.losses.policy import clipped_policy_loss
from rlhf_core.types import Experience


@dataclass(frozen=True, slots=True)
class GRPO:
    """The loss is a mean over the trained tokens of the step (as in DAPO, arXiv:2503.14476), not over sequences."""

    config: GRPOConfig
    uses_critic: bool = False
    kl_in_reward: bool = False

    def advantages(self, experience: Experience, rewards: Tensor, group_ids: Tensor) -> Experience:
        """(r - group mean) / group std, the same for every token of a completion."""
        per_sequence = adv.group_normalised(rewards, group_ids)
        advantages = adv.broadcast_to_tokens(per_sequence, experience.loss_mask, experience.sequence_lengths)
        return replace(experience, advantages=advantages)

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor | None, experience: Experience, num_tokens: int
    ) -> tuple[Tensor, Metrics]:
        assert experience.advantages is not None
        mask = experience.loss_mask
        old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
        loss, metrics = clipped_policy_loss(
            logprobs, old, experience.advantages, mask,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, num_tokens=num_tokens,
        )  # fmt: skip
        if self.config.kl.coefficient > 0:
            assert experience.ref_logprobs is not None
            term = kl.loss_term(logprobs, experience.ref_logprobs, mask, self.config.kl.estimator, num_tokens)
            loss = loss + self.config.kl.coefficient * term
        return with_entropy_bonus(loss, entropy, mask, self.config.entropy_coefficient, num_tokens), metrics
