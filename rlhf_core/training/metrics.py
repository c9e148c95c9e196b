"""Reduction of metrics (rlhf_core.metrics) over the micro-batches and replicas of a step, and over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.mesh import current_mesh
from rlhf_core.metrics import Max, Metric, TokenMean, merged


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, over its micro-batches and replicas; equal on all ranks."""

    gradient_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, so there was no update
    means: dict[str, float] = field(default_factory=dict)  # reported as Sum or TokenMean
    maxima: dict[str, float] = field(default_factory=dict)  # reported as Max
    num_tokens: int = 0  # trained tokens, over all replicas


class MetricTotals:
    """Running totals of the metrics of one optimizer step's micro-batches, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._token_sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._tokens = torch.zeros((), dtype=torch.float64)
        self.num_tokens = 0  # of all replicas, once they are reduced

    def add(self, metrics: Mapping[str, Metric], num_tokens: Tensor | int) -> None:
        """Add one micro-batch's metrics. num_tokens: its trained tokens."""
        self._tokens = self._tokens + num_tokens
        for name, metric in metrics.items():
            value = metric.value.detach().double()
            if isinstance(metric, Max):
                self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
            else:
                sums = self._token_sums if isinstance(metric, TokenMean) else self._sums
                sums[name] = sums[name] + value if name in sums else value

    def over_replicas(self, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
        """Return means and maxima, as in StepMetrics, over all replicas. Every rank must have added the same names."""
        sum_names, mean_names = sorted(self._sums), sorted(self._token_sums)
        totals = [*(self._sums[n] for n in sum_names), *(self._token_sums[n] for n in mean_names), self._tokens]
        *values, tokens = _all_reduce(totals, dist.ReduceOp.SUM, device)
        self.num_tokens = round(tokens)
        sums = dict(zip(sum_names, values[: len(sum_names)], strict=True))
        token_sums = zip(mean_names, values[len(sum_names) :], strict=True)
        max_names = sorted(self._maxima)
        maxima = _all_reduce([self._maxima[name] for name in max_names], dist.ReduceOp.MAX, device)
        means = merged(sums, {name: value / max(tokens, 1) for name, value in token_sums})
        return means, dict(zip(max_names, maxima, strict=True))


def _all_reduce(values: Sequence[Tensor], operation: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    if not values:
        return []
    stacked = torch.stack([value.to(device) for value in values])
    reduced: list[float] = current_mesh().reduce(stacked, operation, over="data").tolist()
    return reduced


def of_batch(metrics: Mapping[str, Metric], num_tokens: int) -> dict[str, float]:
    """Return the metrics of one whole batch in one process. num_tokens: its trained tokens."""
    totals = MetricTotals()
    totals.add(metrics, num_tokens)
    return merged(*totals.over_replicas(torch.device("cpu")))


def over_steps(steps: Sequence[StepMetrics], prefix: str = "") -> dict[str, float]:
    """Merge the metrics of one or more optimizer steps that report the same names.

    Skipped steps are ignored unless all were skipped. The result has means, the largest of each maximum, and the
    number of `skipped_updates`. prefix: of the names that every model reports, if several models are trained.
    """
    applied = [step for step in steps if not step.skipped] or steps
    common = {
        f"{prefix}gradient_norm": _mean([step.gradient_norm for step in applied]),
        f"{prefix}learning_rate": _mean([step.learning_rate for step in applied]),
        f"{prefix}skipped_updates": float(sum(step.skipped for step in steps)),
    }
    means = {name: _mean([step.means[name] for step in applied]) for name in applied[0].means}
    maxima = {name: max(step.maxima[name] for step in applied) for name in applied[0].maxima}
    return merged(means, maxima, common)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
