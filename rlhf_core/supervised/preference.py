"""Preference learning on one rank: log-probs of both completions of each pair, by the policy and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.losses.preference import PairLogprobs, PreferenceLoss, build_preference_loss
from rlhf_core.metrics import LossAndMetrics, Metric, Sum
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.referenced import ReferencedWorker, sums_by_sequence, trained_lengths
from rlhf_core.types import PreferenceBatch


class PreferenceWorker(ReferencedWorker[PreferenceConfig]):
    def __init__(self, config: PreferenceConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self._losses = {name: build_preference_loss(loss) for name, loss in config.losses.items()}

    def loss(
        self, model: nn.Module, batch: PreferenceBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> LossAndMetrics:
        logprobs, _, routing = model(batch, only=batch.loss_mask, with_routing=step_routing is not None)
        pairs = pair_logprobs(logprobs, batch)
        parts = {name: loss(pairs).sum() / shard.num_examples for name, loss in self._losses.items()}
        weighted = torch.stack([self.config.losses[name].weight * part for name, part in parts.items()]).sum()
        metrics = measured(next(iter(self._losses.values())), pairs, shard.num_examples)
        if len(parts) > 1:
            metrics |= {f"loss/{name}": Sum(part.detach()) for name, part in parts.items()}
        return self.balanced(weighted, metrics, routing, step_routing)


def pair_logprobs(logprobs: Tensor, batch: PreferenceBatch) -> PairLogprobs:
    """Return the log-probs of the batch's pairs, without a filler, which trains nothing. logprobs: (N,) float32, by the
    policy.
    """
    lengths = trained_lengths(batch).view(-1, 2)
    real = lengths[:, 0] > 0
    reference, margins = batch.reference_logprobs, batch.margins
    return PairLogprobs(
        logprobs=sums_by_sequence(logprobs, batch).view(-1, 2)[real],
        lengths=lengths[real],
        reference=None if reference is None else reference.view(-1, 2)[real],
        margins=None if margins is None else margins[real],
    )


def measured(loss: PreferenceLoss[Any], pairs: PairLogprobs, num_pairs: int) -> dict[str, Metric]:
    """Return means over the pairs of the step: accuracy (a tie is wrong), both rewards and their gap, and the mean
    log-prob of a token of either completion.
    """
    with torch.no_grad():
        rewards, means = loss.rewards(pairs), pairs.means
        gap = rewards[:, 0] - rewards[:, 1]
        values: Mapping[str, Tensor] = {
            "accuracy": (gap > 0).float(),
            "reward_gap": gap,
            "chosen_reward": rewards[:, 0],
            "rejected_reward": rewards[:, 1],
            "chosen_logprob": means[:, 0],
            "rejected_logprob": means[:, 1],
        }
        return {name: Sum(value.sum() / num_pairs) for name, value in values.items()}
