"""The best of the validations of a run: its step and metrics, in the driver, and its weights, on the ranks."""

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
        self.step = 0  # steps that were done; 0: nothing finite was measured yet
        self.measured: dict[str, float] = {}  # all metrics of that validation

    def update(self, step: int, measured: Mapping[str, float]) -> bool:
        """Whether this is the best validation so far: the first of several that are equally good, and a finite one."""
        value = measured[self._metric]
        if not math.isfinite(value) or (self.step and self._sign * (value - self.measured[self._metric]) <= 0):
            return False
        self.step, self.measured = step, dict(measured)
        return True

    def metrics(self, prefix: str) -> dict[str, float]:
        """Its value and its step; empty if nothing finite was measured yet."""
        if not self.step:
            return {}
        return {f"{prefix}best": self.measured[self._metric], f"{prefix}best_step": self.step}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "measured": self.measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.measured = state["step"], state["measured"]


class KeptWeights:
    """A copy of the weights in rank 0's main memory. Implements training.state.Stateful.

    They are rank 0's own state, so that no other rank fetches them when a run resumes.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # by their names in a model's folder; empty on other ranks

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """weights: as TrainingEngine.weights yields them. Every rank must call it."""
        for name, tensor in weights:
            if dist.get_rank() == 0:
                self.tensors[name] = tensor.detach().cpu().clone()  # one by one, so that no two copies of all exist

    def state(self) -> RankState:
        return RankState(own=dict(self.tensors))

    def load_state(self, state: RankState) -> None:
        # Copies: what is loaded are views of the whole file, which would stay mapped with them.
        self.tensors = {name: tensor.clone() for name, tensor in state.own.items()}
