"""Expert routing over the tokens of one optimizer step of a mixture-of-experts model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_core.training.engine import TrainingEngine
from rlhf_core.types import PackedBatch


def step_routing(engine: TrainingEngine, micro_batches: Sequence[PackedBatch]) -> Tensor:
    """Return the total `routing_sums`, (2, E), of all micro-batches and ranks, by forwards. Every rank must call it."""

    def routing(model: nn.Module, batch: PackedBatch) -> Tensor:
        sums: Tensor = model(batch, only=torch.zeros_like(batch.loss_mask), with_routing=True)[2]
        return sums

    return engine.total(micro_batches, routing)
