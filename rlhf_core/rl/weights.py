"""Sources of the policy's weights: current, or their moving average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.state import RankState, copy_into

WeightSource = Literal["live", "average"]


def never_changed(layout: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the tensors that no update changes, nor any other of their block, which an engine may fuse with them.

    layout: trained tensors need gradients. The block of `layers.0.mlp.up_proj.weight` is `layers.0.mlp`; all experts of
    a layer are one.
    """
    changed = {_block(name) for name, tensor in layout.items() if tensor.requires_grad}
    return frozenset(name for name in layout if _block(name) not in changed)


def _block(name: str) -> str:
    stack = name.rpartition(".experts.")[0]
    return stack or ".".join(name.split(".")[:-2])


class WeightAverage:
    """Exponential moving average of the trained weights, in float32 in rank 0's host memory, initialised from the
    starting weights.

    Implements training.state.Stateful. Every rank must call every method.
    """

    def __init__(self, engine: TrainingEngine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        first = dist.get_rank() == 0
        # Gathering is collective; only rank 0 keeps copies.
        self._average = {name: w.cpu().clone() if first else w.new_empty(0) for name, w in engine.master_weights()}

    def update(self) -> None:
        """Update after an optimizer step: average ← decay · average + (1 - decay) · weights."""
        for name, weight in self._engine.master_weights():
            if dist.get_rank() == 0:
                self._average[name].lerp_(weight.cpu(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the average inside the context."""
        with self._engine.replaced(self._average if dist.get_rank() == 0 else None):
            yield

    def state(self) -> RankState:
        return RankState(shared=dict(self._average)) if dist.get_rank() == 0 else RankState()

    def load_state(self, state: RankState) -> None:
        if dist.get_rank() == 0:
            copy_into(self._average, state.shared)
