"""The best validation of a run: its step and metrics in the driver, its weights on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhf_core.training.state import RankState


class Best:
    """The best validation so far by one metric. Implements checkpointing.DriverState."""

    def __init__(self, metric: str, *, maximise: bool) -> None:
        self._metric = metric
        self._sign = 1 if maximise else -1
        self.step = 0  # completed steps; 0: no finite value yet
        self.measured: dict[str, float] = {}  # all metrics of that validation

    def update(self, step: int, measured: Mapping[str, float]) -> bool:
        """Record a validation if it is the best so far, and return whether it is.

        A tie or a value that is not finite is not an improvement.
        """
        value = measured[self._metric]
        if not math.isfinite(value) or (self.step and self._sign * (value - self.measured[self._metric]) <= 0):
            return False
        self.step, self.measured = step, dict(measured)
        return True

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the best value and its step; empty before the first finite value."""
        if not self.step:
            return {}
        return {f"{prefix}best": self.measured[self._metric], f"{prefix}best_step": self.step}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "measured": self.measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.measured = state["step"], state["measured"]


class KeptWeights:
    """A copy of the weights in rank 0's host memory. Implements training.state.Stateful.

    The copy is part of rank 0's own state, so that no other rank downloads it on resume.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # by name in the model's folder; empty on other ranks

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `weights`, as yielded by TrainingEngine.weights. Every rank must call it."""
        for name, tensor in weights:
            if dist.get_rank() == 0:
                self.tensors[name] = tensor.detach().cpu().clone()  # one at a time: never two full copies

    def state(self) -> RankState:
        return RankState(own=dict(self.tensors))

    def load_state(self, state: RankState) -> None:
        if dist.get_rank() == 0:
            # Loaded tensors are views of the mapped file, which they would keep open.
            self.tensors = {name: tensor.clone() for name, tensor in state.own.items()}
