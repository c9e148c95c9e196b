"""GDPO, group reward-decoupled normalisation: arXiv:2601.05242."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.base import Algorithm, to_tokens
from rlhf_core.config.rl.algorithms import GDPOConfig
from rlhf_core.losses import advantages as adv
from rlhf_core.types import Scored, TrainingBatch


@dataclass(frozen=True)
class GDPO(Algorithm):
    """Advantage: each reward normalised in its group as in GRPO, their weighted sum, whitened over the step's episodes.
    Loss: as GRPO's.

    Models: policy, reference for the KL. With one reward it is GRPO whose advantages are whitened.
    """

    config: GDPOConfig

    def _combined(self, rewards: Tensor, by_name: Mapping[str, Tensor], group_ids: Tensor) -> Tensor:
        """(E,): sum of weight x normalised reward. Raises ValueError where a reward is missing in `by_name`."""
        if missing := self.config.rewards.keys() - by_name.keys():
            raise ValueError(f"GDPO normalises each reward: `by_name` lacks {', '.join(sorted(missing))}")
        normalised = [
            reward.weight
            * adv.group_normalised(by_name[name], group_ids, divide_by_std=self.config.divide_by_deviation).double()
            for name, reward in self.config.rewards.items()
        ]
        return torch.stack(normalised).sum(0)

    def _advantages(self, scored: Scored, rewards: Tensor, group_ids: Tensor, kl_coefficient: float) -> TrainingBatch:
        whitened = adv.whiten(rewards, torch.ones_like(rewards, dtype=torch.bool)).float()
        return TrainingBatch(**vars(scored), advantages=to_tokens(whitened, scored))
