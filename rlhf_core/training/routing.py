"""How often the tokens of one optimizer step are routed to each expert of a mixture-of-experts model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_core.training.engine import TrainingEngine
from rlhf_core.types import PackedBatch


def step_routing(engine: TrainingEngine, micro_batches: Sequence[PackedBatch]) -> Tensor:
    """(2, E): the `routing_sums` of all micro-batches of all ranks, by a forward of each. Every rank must call it."""

    def routing(model: nn.Module, batch: PackedBatch) -> Tensor:
        sums: Tensor = model(batch, only=torch.zeros_like(batch.loss_mask), with_routing=True)[2]
        return sums

    return engine.total(micro_batches, routing)
