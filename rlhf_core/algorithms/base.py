"""Interface of an algorithm: the models it needs, its advantages, and its loss on a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from rlhf_core.config.rl.algorithms import AlgorithmConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.losses import kl
from rlhf_core.losses.masking import weighted_sum
from rlhf_core.losses.mismatch import corrected
from rlhf_core.losses.policy import clipped_policy_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.types import Minibatch, Rollouts, Scored, TrainingBatch


@dataclass(frozen=True)
class Algorithm(ABC):
    """A pure function of tensors; driver and workers hold equal objects.

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
        """True if the KL is part of the reward, which needs old log-probs before the advantages."""
        return self.uses_reference and self.config.kl.place == "reward"

    def advantages(
        self,
        scored: Scored,
        rewards: Tensor,
        group_ids: Tensor,
        kl_coefficient: float,
        by_name: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> TrainingBatch:
        """Return `scored` with `advantages` and, where the algorithm has them, `returns` and `rewards`.

        rewards: (E,) float32, one per episode: the weighted sum, shaped; group_ids: (E,) int64, equal for episodes of
        one prompt; kl_coefficient: of this step; by_name: (E,) float32, each reward before its weight. The batch is the
        whole step's, over all ranks, so that statistics are global.
        An episode counts once in its group, however many sequences it has, and each of them gets its advantage.
        Raises ValueError if there are rewards of steps and the algorithm takes none, an episode has several sequences,
        or the rewards are at tokens that the policy did not sample.
        """
        steps = scored.step_ends
        if steps is not None and not self.config.takes_process_rewards:
            raise ValueError(f"{type(self).__name__} judges whole completions: it takes no rewards of steps")
        if steps is not None and scored.num_sequences > rewards.numel():
            raise ValueError("rewards of steps are of single sequences, but an episode has several")
        if steps is not None and bool((steps & ~scored.loss_mask).any()):
            raise ValueError("a step ends at a token that the policy did not sample")
        batch = self._advantages(scored, self._combined(rewards, by_name, group_ids), group_ids, kl_coefficient)
        if self.config.teacher is not None:
            batch = replace(batch, advantages=self._with_teacher(batch, self.config.teacher.coefficient))
        if self.config.cross_entropy is not None:
            good = rewards >= self.config.cross_entropy.least_reward
            batch = replace(batch, imitated=good[batch.episode_ids] & batch.loss_mask)
        return batch

    def _combined(self, rewards: Tensor, by_name: Mapping[str, Tensor], group_ids: Tensor) -> Tensor:
        """(E,): what the advantages are computed from; `rewards`, unless the algorithm combines them in another way."""
        return rewards

    @abstractmethod
    def _advantages(
        self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float
    ) -> TrainingBatch: ...

    def _with_teacher(self, batch: TrainingBatch, coefficient: float) -> Tensor:
        """Return the advantages plus the teacher's term at each trained token, (N,)."""
        assert batch.old_logprobs is not None
        assert batch.teacher_logprobs is not None
        difference = batch.teacher_logprobs - batch.old_logprobs
        return batch.advantages + torch.where(batch.loss_mask, coefficient * difference, 0.0)

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Minibatch) -> LossAndMetrics:
        """Return the loss whose gradient is the policy gradient near the old policy: PPO's, unless overridden.

        logprobs: (n,) float32, differentiable; old_logprobs: (n,) float32; of `batch` the mask, the advantages and the
        loss weights are read.
        """
        return clipped_policy_loss(
            logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.loss_weights,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, dual_clip=self.config.dual_clip,
        )  # fmt: skip

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Minibatch, kl_coefficient: float
    ) -> LossAndMetrics:
        """Return the loss () of one micro-batch, its share of the optimizer step's, and sums over its trained tokens.

        The loss is a weighted sum: surrogate, KL where it is a part of the loss, cross-entropy of imitated tokens, and
        entropy bonus.
        logprobs, entropy: (n,) float32, differentiable, of the micro-batch `batch`, whose `loss_weights` are those of
        the whole optimizer step. Without `old_logprobs` this is the only update, and the current log-probs replace
        them.
        """
        mask, weights = batch.loss_mask, batch.loss_weights
        old = batch.old_logprobs if batch.old_logprobs is not None else logprobs.detach()
        loss, metrics = self.surrogate(logprobs, old, self._corrected(batch, old))
        if self.uses_reference and self.config.kl.place == "loss":
            assert batch.ref_logprobs is not None
            term = kl.loss_term(logprobs, batch.ref_logprobs, mask, weights, self.config.kl.estimator)
            loss = loss + kl_coefficient * term
        if self.config.cross_entropy is not None:
            assert batch.imitation_weights is not None
            term = -weighted_sum(logprobs, batch.imitation_weights, mask)
            loss = loss + self.config.cross_entropy.coefficient * term
            metrics = merged(metrics, {"cross_entropy": Sum(term.detach())})
        if entropy is not None and self.config.entropy_coefficient > 0:
            loss = loss - self.config.entropy_coefficient * weighted_sum(entropy, weights, mask)
        return loss, metrics

    def _corrected(self, batch: Minibatch, old_logprobs: Tensor) -> Minibatch:
        """Return `batch` with mask and loss weights corrected for the mismatch of engine and trainer."""
        mismatch = self.config.mismatch
        if mismatch is None:
            return batch
        mask, weights = corrected(
            old_logprobs, batch.rollout_logprobs, batch.loss_mask, batch.loss_weights,
            batch.sequence_lengths, correction=mismatch.correction, ratio_of=mismatch.ratio_of, low=mismatch.low,
            high=mismatch.high,
        )  # fmt: skip
        return replace(batch, loss_mask=mask, loss_weights=weights)

    def _kl_rewards(self, scored: Scored, coefficient: float) -> Tensor:
        """Return minus coefficient x KL to the reference at each trained token, (N,); 0 if the reward has no KL."""
        nothing = torch.zeros(scored.num_tokens)
        if not self.kl_in_reward:
            return nothing
        assert scored.old_logprobs is not None
        assert scored.ref_logprobs is not None
        divergence = kl.estimate(scored.old_logprobs, scored.ref_logprobs, self.config.kl.estimator)
        return torch.where(scored.loss_mask, -coefficient * divergence, nothing)

    def _token_rewards(self, scored: Scored, rewards: Tensor, coefficient: float) -> Tensor:
        """Return the rewards of KL and steps, and the episode's on the last trained token of each sequence, (N,)."""
        token_rewards = self._kl_rewards(scored, coefficient)
        if scored.process_rewards is not None:
            token_rewards = token_rewards + scored.process_rewards
        token_rewards[last_trained_token(scored)] += rewards[scored.episodes]
        return token_rewards

    def _episode_rewards(self, scored: Scored, rewards: Tensor, coefficient: float) -> Tensor:
        """Return each episode's reward plus the sum of its KL rewards, (E,)."""
        return rewards.index_add(0, scored.episode_ids, self._kl_rewards(scored, coefficient))


def to_tokens(per_episode: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the value of each episode at its trained tokens, (N,)."""
    return adv.broadcast_to_tokens(per_episode, rollouts.loss_mask, rollouts.episode_lengths)


def last_trained_token(rollouts: Rollouts) -> Tensor:
    """Return the index of the last sampled token of each sequence, (S,) int64.

    Raises ValueError if a sequence has none.
    """
    index = torch.arange(rollouts.num_tokens).masked_fill(~rollouts.loss_mask, -1)
    last = torch.full((rollouts.num_sequences,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, rollouts.sequence_ids, index, reduce="amax")
    if bool((last < 0).any()):
        raise ValueError("a trajectory without a sampled token cannot carry a reward")
    return last
