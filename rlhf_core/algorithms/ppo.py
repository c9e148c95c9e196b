"""PPO with a critic: arXiv:1707.06347, as used on language models in arXiv:2203.02155."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.algorithms.base import Algorithm
from rlhf_core.config.rl.algorithms import PPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class PPO(Algorithm):
    """Advantage: GAE over the tokens' rewards (KL, steps, outcome), whitened. Loss: clipped, and the critic's.

    Models: policy, critic, reference for the KL. As in OpenRLHF, except that GAE skips tokens of the environment.
    """

    config: PPOConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        e = scored
        assert e.values is not None
        token_rewards = self._token_rewards(e, rewards, kl_coefficient)
        advantages, returns = adv.gae(
            token_rewards, e.values, e.loss_mask, e.sequence_lengths,
            gamma=self.config.gamma, lam=self.config.gae_lambda,
        )  # fmt: skip
        return TrainingBatch(
            **vars(e), rewards=token_rewards, advantages=adv.whiten(advantages, e.loss_mask), returns=returns
        )
