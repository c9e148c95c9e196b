"""Sources of the policy's weights: current, or their moving average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from rlhf_core.training.divided import DividedTensors
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.state import RankState

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
    """Exponential moving average of the trained weights, in float32, divided over the ranks' host memory.

    Initialised from the starting weights. Implements training.state.Stateful. Every rank must call every method.
    """

    def __init__(self, engine: TrainingEngine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._average = DividedTensors({n: w.new_empty(w.shape, device="meta") for n, w in engine.master_weights()})
        self._average.fill(engine.master_weights())

    def update(self) -> None:
        """Update after an optimizer step: average ← decay · average + (1 - decay) · weights."""
        for name, weight in self._engine.master_weights():
            if name in self._average.own:
                self._average.own[name].lerp_(weight.cpu(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the average inside the context."""
        with self._engine.replaced(self._average):
            yield

    def state(self) -> RankState:
        return self._average.state()

    def load_state(self, state: RankState) -> None:
        self._average.load_state(state)
