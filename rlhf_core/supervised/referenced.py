"""One rank that trains a policy against a reference, whose log-probs of each sequence are computed before the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.reference_model import ReferencedConfig
from rlhf_core.contract import StageContext
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.policy import PolicyWorker
from rlhf_core.supervised.worker import exact_share
from rlhf_core.training.randomness import seed_rank
from rlhf_core.training.reference import AdapterOff, FrozenCopy, Reference
from rlhf_core.types import PackedBatch, ReferencedBatch

R = TypeVar("R", bound=ReferencedConfig)
B = TypeVar("B", bound=ReferencedBatch)


class ReferencedWorker(PolicyWorker[R]):
    def __init__(
        self, config: R, context: StageContext, model: ArtifactRef, total_steps: int, reference: ArtifactRef
    ) -> None:
        super().__init__(config, context, model, total_steps)
        self._reference: Reference | None = None
        if config.reference_is_base:
            self._reference = AdapterOff(self.engine)
        elif config.runs_reference:
            folder = context.fetch(reference).folder
            self._reference = FrozenCopy(folder, config.reference_engine, offloaded=config.reference.offload)
        seed_rank(context.seed)

    def validate(self, shard: Shard) -> dict[str, float]:
        measured = super().validate(shard)
        return measured | {"accuracy": exact_share(measured["accuracy"], shard.num_examples)}

    def prepared(self, shard: Shard) -> Shard:
        batches = cast(list[ReferencedBatch], shard.micro_batches)
        return replace(shard, micro_batches=list[PackedBatch](self.with_reference(batches)))

    def with_reference(self, batches: Sequence[B]) -> list[B]:
        """Add the reference's log-probs to the batches.

        The reference reads the policy's micro-batches: packed differently it would round differently.
        """
        if self._reference is None:
            return list(batches)
        logprobs = self._reference.forward(batches, sequence_logprobs)
        return [
            replace(batch, reference_logprobs=values.cpu()) for batch, values in zip(batches, logprobs, strict=True)
        ]


def sequence_logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Return the sum of the log-probs of each sequence's trained tokens, (S,) float32."""
    return sums_by_sequence(model(batch, only=batch.loss_mask)[0], batch)


def sums_by_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the sum of `values` (N,) over the trained tokens of each sequence, (S,)."""
    mask = batch.loss_mask
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids[mask], values[mask])


def trained_lengths(batch: PackedBatch) -> Tensor:
    """Return the number of trained tokens of each sequence, (S,) float32."""
    return sums_by_sequence(torch.ones_like(batch.loss_mask, dtype=torch.float32), batch)
