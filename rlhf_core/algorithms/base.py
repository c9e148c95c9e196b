"""What an algorithm is: which models it needs, how rewards become advantages, and the loss of a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.config.algorithms import AlgorithmConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.losses import kl
from rlhf_core.losses.masking import weighted_sum
from rlhf_core.losses.mismatch import corrected
from rlhf_core.losses.policy import clipped_policy_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.types import Experience


@dataclass(frozen=True)
class Algorithm(ABC):
    """Pure: tensors in, tensors out; equal objects live in the driver and in every worker.

    The models: always the policy; a reference where the KL counts; a teacher and a critic where the settings have one.
    """

    config: AlgorithmConfig

    @property
    def uses_reference(self) -> bool:
        return self.config.uses_reference

    @property
    def uses_critic(self) -> bool:
        return self.config.critic_settings is not None

    @property
    def uses_teacher(self) -> bool:
        return self.config.teacher is not None

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is part of the reward, so that old log-probs must be known before the advantages."""
        return self.uses_reference and self.config.kl.place == "reward"

    def advantages(
        self, experience: Experience, rewards: Tensor, group_ids: Tensor, kl_coefficient: float
    ) -> Experience:
        """`experience` with `advantages` (and, where the algorithm has them, `returns` and `rewards`) filled in.

        rewards: (E,) float32, one of each episode; group_ids: (E,) int64, equal for episodes of one prompt;
        kl_coefficient: of this step. The experience is the whole step's, over all ranks, so that statistics are global.
        An episode counts once among its group, however many sequences it has, and each of them gets what it earns.
        Raises ValueError if it has rewards of steps and the algorithm takes none, an episode has several sequences, or
        they are at other tokens than the policy's.
        """
        steps = experience.step_ends
        if steps is not None and not self.config.takes_process_rewards:
            raise ValueError(f"{type(self).__name__} judges whole completions: it takes no rewards of steps")
        if steps is not None and experience.num_sequences > rewards.numel():
            raise ValueError("rewards of steps are of single sequences, but an episode has several")
        if steps is not None and bool((steps & ~experience.loss_mask).any()):
            raise ValueError("a step ends at a token that the policy did not sample")
        judged = self._advantages(experience, rewards, group_ids, kl_coefficient)
        if self.config.teacher is not None:
            judged = replace(judged, advantages=self._with_teacher(judged, self.config.teacher.coefficient))
        if self.config.cross_entropy is not None:
            good = rewards >= self.config.cross_entropy.least_reward
            judged = replace(judged, imitated=good[judged.episode_ids] & judged.loss_mask)
        return judged

    @abstractmethod
    def _advantages(
        self, experience: Experience, rewards: Tensor, group_ids: Tensor, kl_coefficient: float
    ) -> Experience: ...

    def _with_teacher(self, experience: Experience, coefficient: float) -> Tensor:
        """(N,): the advantages, and at each trained token what the teacher says of it beside them."""
        assert experience.advantages is not None
        assert experience.old_logprobs is not None
        assert experience.teacher_logprobs is not None
        difference = experience.teacher_logprobs - experience.old_logprobs
        return experience.advantages + torch.where(experience.loss_mask, coefficient * difference, 0.0)

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, experience: Experience) -> LossAndMetrics:
        """The loss whose gradient is the policy gradient near the old policy: PPO's, unless the algorithm has its own.

        logprobs: (n,) float32, differentiable; old_logprobs: (n,) float32; of `experience` the mask, the advantages
        and the loss weights are read.
        """
        assert experience.advantages is not None
        assert experience.loss_weights is not None
        return clipped_policy_loss(
            logprobs, old_logprobs, experience.advantages, experience.loss_mask, experience.loss_weights,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, dual_clip=self.config.dual_clip,
        )  # fmt: skip

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor | None, experience: Experience, kl_coefficient: float
    ) -> LossAndMetrics:
        """Loss () of one micro-batch as its share of the optimizer step's, a weighted sum: surrogate, KL where it is a
        part of the loss, cross-entropy of what is imitated, and entropy bonus; and sums over its trained tokens.

        logprobs, entropy: (n,) float32, differentiable, of the micro-batch `experience`, whose `loss_weights` are those
        of the whole optimizer step. Without `old_logprobs` this is the only update, and they are the log-probs now.
        """
        mask, weights = experience.loss_mask, experience.loss_weights
        assert weights is not None
        old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
        loss, metrics = self.surrogate(logprobs, old, self._corrected(experience, old))
        if self.uses_reference and self.config.kl.place == "loss":
            assert experience.ref_logprobs is not None
            term = kl.loss_term(logprobs, experience.ref_logprobs, mask, weights, self.config.kl.estimator)
            loss = loss + kl_coefficient * term
        if self.config.cross_entropy is not None:
            assert experience.imitation_weights is not None
            term = -weighted_sum(logprobs, experience.imitation_weights, mask)
            loss = loss + self.config.cross_entropy.coefficient * term
            metrics = merged(metrics, {"cross_entropy": Sum(term.detach())})
        if entropy is not None and self.config.entropy_coefficient > 0:
            loss = loss - self.config.entropy_coefficient * weighted_sum(entropy, weights, mask)
        return loss, metrics

    def _corrected(self, experience: Experience, old_logprobs: Tensor) -> Experience:
        """`experience` with mask and loss weights corrected for the mismatch of engine and trainer."""
        mismatch = self.config.mismatch
        if mismatch is None:
            return experience
        assert experience.rollout_logprobs is not None
        assert experience.loss_weights is not None
        mask, weights = corrected(
            old_logprobs, experience.rollout_logprobs, experience.loss_mask, experience.loss_weights,
            experience.sequence_lengths, correction=mismatch.correction, low=mismatch.low, high=mismatch.high,
        )  # fmt: skip
        return replace(experience, loss_mask=mask, loss_weights=weights)

    def _kl_rewards(self, experience: Experience, coefficient: float) -> Tensor:
        """(N,): minus coefficient x KL to the reference at each trained token; 0 where the KL is not in the reward."""
        nothing = torch.zeros(experience.num_tokens)
        if not self.kl_in_reward:
            return nothing
        assert experience.old_logprobs is not None
        assert experience.ref_logprobs is not None
        divergence = kl.estimate(experience.old_logprobs, experience.ref_logprobs, self.config.kl.estimator)
        return torch.where(experience.loss_mask, -coefficient * divergence, nothing)

    def _token_rewards(self, experience: Experience, rewards: Tensor, coefficient: float) -> Tensor:
        """(N,): the KL's rewards, those of steps, and an episode's own on the last trained token of each sequence."""
        token_rewards = self._kl_rewards(experience, coefficient)
        if experience.process_rewards is not None:
            token_rewards = token_rewards + experience.process_rewards
        token_rewards[last_trained_token(experience)] += rewards[experience.episodes]
        return token_rewards

    def _episode_rewards(self, experience: Experience, rewards: Tensor, coefficient: float) -> Tensor:
        """(E,): an episode's reward and the sum of its KL's rewards."""
        return rewards.index_add(0, experience.episode_ids, self._kl_rewards(experience, coefficient))


def to_tokens(per_episode: Tensor, experience: Experience) -> Tensor:
    """(N,): the value of each episode at its trained tokens."""
    return adv.broadcast_to_tokens(per_episode, experience.loss_mask, experience.episode_lengths)


def last_trained_token(experience: Experience) -> Tensor:
    """(S,) int64: index of the last sampled token of each sequence. Raises ValueError if a sequence has none."""
    index = torch.arange(experience.num_tokens).masked_fill(~experience.loss_mask, -1)
    last = torch.full((experience.num_sequences,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, experience.sequence_ids, index, reduce="amax")
    if bool((last < 0).any()):
        raise ValueError("a trajectory without a sampled token cannot carry a reward")
    return last
