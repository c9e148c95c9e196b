"""The best validation of a run: its step and metrics in the driver, its weights divided over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.training.divided import DividedTensors
from rlhf_core.training.state import RankState, copy_into


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
    """A copy of the weights, divided over the ranks' host memory. Implements training.state.Stateful.

    Every rank must call every method.
    """

    def __init__(self, layout: Mapping[str, Tensor]) -> None:
        """layout: TrainingEngine.weight_layout."""
        self._tensors = DividedTensors(layout)
        self._kept = torch.tensor(False)

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `weights`, as yielded by TrainingEngine.weights."""
        self._tensors.fill(weights)
        self._kept.fill_(True)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the copy as TrainingEngine.weights does. Raises StageError if there is none."""
        if not self._kept:
            raise StageError("no weights were kept: no validation of this run was finite")
        return self._tensors

    @property
    def layout(self) -> Mapping[str, Tensor]:
        return self._tensors.layout

    def state(self) -> RankState:
        return replace(self._tensors.state(), shared={"is_kept": self._kept})

    def load_state(self, state: RankState) -> None:
        copy_into({"is_kept": self._kept}, state.shared)
        self._tensors.load_state(state)
