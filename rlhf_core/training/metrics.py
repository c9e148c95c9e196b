"""Metrics of one optimizer step, over its micro-batches and its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class StepMetrics:
    """Adds up what each micro-batch reports; of a name that ends in `_max` the largest value is kept instead."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """One micro-batch's metrics, each of shape ()."""
        for name, metric in metrics.items():
            value = metric.detach().double()
            if name.endswith("_max"):
                self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def over_ranks(self, device: torch.device) -> dict[str, float]:
        """The totals over all ranks, each of which must have added the same names."""
        return {**_reduced(self._sums, dist.ReduceOp.SUM, device), **_reduced(self._maxima, dist.ReduceOp.MAX, device)}


def _reduced(
    values: Mapping[str, Tensor], operation: dist.ReduceOp.RedOpType, device: torch.device
) -> dict[str, float]:
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([values[name].to(device) for name in names])
    if dist.get_world_size() > 1:
        dist.all_reduce(stacked, op=operation)
    return dict(zip(names, stacked.tolist(), strict=True))


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One set of metrics for several optimizer steps, at least one, that report the same names.

    Means over the steps that were applied (over all, if none was), but the largest of a name that ends in `_max`, and
    the sum of `skipped_updates`.
    """
    applied = [step for step in steps if not step["skipped_updates"]] or steps
    means = {name: sum(step[name] for step in applied) / len(applied) for name in applied[0]}
    maxima = {name: max(step[name] for step in applied) for name in means if name.endswith("_max")}
    return {**means, **maxima, "skipped_updates": sum(step["skipped_updates"] for step in steps)}
