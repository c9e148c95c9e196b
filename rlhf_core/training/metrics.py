"""The reduction of metrics (rlhf_core.metrics): over the micro-batches and replicas of a step, and over steps."""

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


class MetricTotals:
    """Adds up the metrics of the micro-batches of one optimizer step, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._token_sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._tokens = torch.zeros((), dtype=torch.float64)

    def add(self, metrics: Mapping[str, Metric], num_tokens: Tensor | int) -> None:
        """One micro-batch's metrics, and the number of its trained tokens."""
        self._tokens = self._tokens + num_tokens
        for name, metric in metrics.items():
            value = metric.value.detach().double()
            if isinstance(metric, Max):
                self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
            else:
                sums = self._token_sums if isinstance(metric, TokenMean) else self._sums
                sums[name] = sums[name] + value if name in sums else value

    def over_replicas(self, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
        """Means and maxima, as in StepMetrics, over all replicas. Every rank must have added the same names."""
        names, counted = sorted(self._sums), sorted(self._token_sums)
        totals = [*(self._sums[name] for name in names), *(self._token_sums[name] for name in counted), self._tokens]
        *values, tokens = _all_reduce(totals, dist.ReduceOp.SUM, device)
        sums = dict(zip(names, values[: len(names)], strict=True))
        token_sums = zip(counted, values[len(names) :], strict=True)
        largest = sorted(self._maxima)
        maxima = _all_reduce([self._maxima[name] for name in largest], dist.ReduceOp.MAX, device)
        means = merged(sums, {name: value / max(tokens, 1) for name, value in token_sums})
        return means, dict(zip(largest, maxima, strict=True))


def _all_reduce(values: Sequence[Tensor], operation: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    if not values:
        return []
    stacked = torch.stack([value.to(device) for value in values])
    reduced: list[float] = current_mesh().reduce(stacked, operation, over="data").tolist()
    return reduced


def of_batch(metrics: Mapping[str, Metric], num_tokens: int) -> dict[str, float]:
    """The metrics of one whole batch in one process; num_tokens: its trained tokens."""
    totals = MetricTotals()
    totals.add(metrics, num_tokens)
    return merged(*totals.over_replicas(torch.device("cpu")))


def over_steps(steps: Sequence[StepMetrics], prefix: str = "") -> dict[str, float]:
    """One set of metrics for several optimizer steps, at least one, that report the same names.

    Means over the steps that were applied (over all steps, if none was), but the largest value of a maximum, and
    the number of `skipped_updates`. prefix: of the names that every model reports, where several are trained.
    """
    applied = [step for step in steps if not step.skipped] or steps
    own = {
        f"{prefix}gradient_norm": _mean([step.gradient_norm for step in applied]),
        f"{prefix}learning_rate": _mean([step.learning_rate for step in applied]),
        f"{prefix}skipped_updates": float(sum(step.skipped for step in steps)),
    }
    means = {name: _mean([step.means[name] for step in applied]) for name in applied[0].means}
    maxima = {name: max(step.maxima[name] for step in applied) for name in applied[0].maxima}
    return merged(means, maxima, own)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
