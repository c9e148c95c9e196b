"""REINFORCE++: arXiv:2501.03262."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm
from rlhf_core.config.rl.algorithms import ReinforcePlusPlusConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class ReinforcePlusPlus(Algorithm):
    """Advantage: discounted returns of the tokens' rewards (KL, steps, outcome), whitened over the step's tokens. Loss:
    clipped. Models: policy, reference for the KL. OpenRLHF's form is the paper's.
    """

    config: ReinforcePlusPlusConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        e = scored
        token_rewards = self._token_rewards(e, rewards, kl_coefficient)
        returns = adv.discounted_returns(token_rewards, e.loss_mask, e.sequence_lengths, gamma=self.config.gamma)
        return TrainingBatch(
            **vars(e), rewards=token_rewards, advantages=adv.whiten(returns, e.loss_mask), returns=returns
        )
