"""REINFORCE++-baseline: the variant of arXiv:2501.03262 for several completions of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.rl.algorithms import ReinforcePlusPlusBaselineConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(Algorithm):
    """Advantage: reward minus the mean of its group, whitened over the step's tokens. Loss: clipped, and the KL's k2.

    Models: policy, reference for the KL. OpenRLHF leaves the estimator of the KL to the user; the paper's is k2.
    """

    config: ReinforcePlusPlusBaselineConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        whole = self._episode_rewards(scored, rewards, kl_coefficient)
        centred = to_tokens(adv.group_normalised(whole, group_ids, divide_by_std=False), scored)
        return TrainingBatch(**vars(scored), advantages=adv.whiten(centred, scored.loss_mask))
