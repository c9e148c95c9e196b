"""Preference learning on one rank: log-probs of both completions of each pair, by the policy and its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.preference import PreferenceConfig
from rlhf_core.contract import StageContext
from rlhf_core.metrics import LossAndMetrics, Metric, Sum
from rlhf_core.preference_losses import PairLogprobs, PreferenceLoss, build_preference_loss
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.policy import PolicyWorker
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_rank
from rlhf_core.training.reference import AdapterOff, FrozenCopy, Reference
from rlhf_core.types import PackedBatch, PreferenceBatch


class PreferenceWorker(PolicyWorker[PreferenceConfig]):
    def __init__(
        self,
        config: PreferenceConfig,
        context: StageContext,
        model: ArtifactRef,
        total_steps: int,
        reference: ArtifactRef,
    ) -> None:
        super().__init__(config, context, model, total_steps)
        self._losses = {name: build_preference_loss(loss) for name, loss in config.losses.items()}
        self._reference: Reference | None = None
        if config.reference_is_base:
            self._reference = AdapterOff(self.engine)
        elif config.uses_reference:
            folder = context.fetch(reference).folder
            self._reference = FrozenCopy(folder, config.reference_engine, offloaded=config.reference.offload)
        seed_rank(context.seed)

    def train(self, steps: Sequence[Shard]) -> list[StepMetrics]:
        return super().train([self._with_reference(shard) for shard in steps])

    def validate(self, shard: Shard) -> dict[str, float]:
        return super().validate(self._with_reference(shard))

    def _with_reference(self, shard: Shard) -> Shard:
        if self._reference is None:
            return shard
        found = self._reference.forward(shard.micro_batches, _reference_logprobs)
        batches: list[PackedBatch] = []
        for batch, values in zip(shard.micro_batches, found, strict=True):
            assert isinstance(batch, PreferenceBatch)
            batches.append(replace(batch, reference_logprobs=values.cpu()))
        return replace(shard, micro_batches=batches)

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


def _reference_logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(S,) float32: of the trained tokens of each sequence together."""
    return sums_by_sequence(model(batch, only=batch.loss_mask)[0], batch)


def sums_by_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """(S,): the sum of `values` (N,) over the trained tokens of each sequence."""
    mask = batch.loss_mask
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids[mask], values[mask])


def pair_logprobs(logprobs: Tensor, batch: PreferenceBatch) -> PairLogprobs:
    """Of the batch's pairs, without a filler, of which nothing is trained. logprobs: (N,) float32, by the policy."""
    lengths = sums_by_sequence(torch.ones_like(logprobs), batch).view(-1, 2)
    real = lengths[:, 0] > 0
    reference = batch.reference_logprobs
    return PairLogprobs(
        logprobs=sums_by_sequence(logprobs, batch).view(-1, 2)[real],
        lengths=lengths[real],
        reference=None if reference is None else reference.view(-1, 2)[real],
    )


def measured(loss: PreferenceLoss[Any], pairs: PairLogprobs, num_pairs: int) -> dict[str, Metric]:
    """Means over the pairs of the step: how often the chosen completion has the higher reward (a tie is wrong), both
    rewards and their gap, and the mean log-prob of a token of either."""
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
