"""GRPO, arXiv:2402.03300; with other settings Dr. GRPO, arXiv:2503.20783, and DAPO, arXiv:2503.14476."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.rl.algorithms import GRPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Advantage: (reward - mean of its group) / deviation of its group; process rewards add theirs. Loss: clipped, a
    mean over completions of their means, and the KL's k3.

    Models: policy, reference for the KL. OpenRLHF takes the mean over tokens (aggregation: token).

    Dr. GRPO: no division by the deviation, and sums over completions divided by a constant, so that neither easy groups
    nor short completions count more. DAPO: a higher upper bound and a mean over tokens; dynamic sampling (`filtering`)
    and the overlong penalty (`shaping`) are separate settings. Both have no KL unless it is set.
    """

    config: GRPOConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        e = scored
        whole = self._episode_rewards(e, rewards, kl_coefficient)
        advantages = to_tokens(adv.group_normalised(whole, group_ids, divide_by_std=self.config.divide_by_deviation), e)
        if e.process_rewards is not None:
            assert e.step_ends is not None
            advantages = advantages + adv.process_advantages(
                e.process_rewards, e.step_ends, group_ids, e.loss_mask, e.sequence_lengths,
                divide_by_std=self.config.divide_by_deviation,
            )  # fmt: skip
        return TrainingBatch(**vars(e), advantages=advantages)
