"""On-policy distillation: arXiv:2306.13649, by the policy gradient of the reverse KL."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.rl.algorithms import OnPolicyDistillationConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class OnPolicyDistillation(Algorithm):
    """Advantage: the teacher's log-prob of a token minus the student's, as in every algorithm with a `teacher`; with
    rewards, also the reward minus the mean of its group. Loss: clipped, a mean over tokens.

    Models: policy, teacher, reference for the KL. The gradient is that of KL(student || teacher) of each next token,
    without the token's effect on later ones (discount 0). OpenRLHF has no such algorithm.
    """

    config: OnPolicyDistillationConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        centred = adv.group_normalised(rewards, group_ids, divide_by_std=False)
        return TrainingBatch(
            **vars(scored), advantages=to_tokens(centred, scored) + self._kl_rewards(scored, kl_coefficient)
        )
