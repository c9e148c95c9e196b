"""An RL algorithm: GRPO with a critic, which learns the returns that the advantages ignore."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field
from torch import Tensor

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.config.rl.algorithm_table import AlgorithmEntry
from rlhf_core.config.rl.algorithms import GRPOConfig
from rlhf_core.config.rl.critic import CriticConfig
from rlhf_core.losses.advantages import discounted_returns
from rlhf_core.types import Scored, TrainingBatch


class CriticGRPOConfig(GRPOConfig):
    critic: CriticConfig = Field(description="of the returns")


@dataclass(frozen=True)
class CriticGRPO(GRPO):
    config: CriticGRPOConfig

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        token_rewards = self._token_rewards(scored, rewards, kl_coefficient)
        returns = discounted_returns(token_rewards, scored.loss_mask, scored.sequence_lengths, gamma=1.0)
        return replace(super()._advantages(scored, rewards, group_ids, kl_coefficient), returns=returns)


CRITIC_GRPO = AlgorithmEntry("critic_grpo", CriticGRPOConfig, "alignment_example.algorithm:CriticGRPO")
