"""Metrics that a loss reports beside its value, each with its reduction over the parts of an optimizer step.

training/metrics.py reduces: over micro-batches, over ranks, and over the steps of one line of metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Sum:
    """A micro-batch's part of a total over micro-batches and ranks. Over steps: the mean."""

    value: Tensor  # ()


@dataclass(frozen=True, slots=True)
class TokenMean:
    """A sum over tokens, whose total is divided by the number of trained tokens of the step. Over steps: the mean."""

    value: Tensor  # ()


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value over micro-batches, ranks and steps."""

    value: Tensor  # ()


Metric = Sum | TokenMean | Max
LossAndMetrics = tuple[Tensor, Mapping[str, Metric]]  # a micro-batch's part of the step's loss (), and its metrics


def merged(*parts: Mapping[str, V]) -> dict[str, V]:
    """Merge the metrics of `parts`. Raises ValueError if a name occurs twice, since one value would hide the other."""
    together: dict[str, V] = {}
    for part in parts:
        if twice := sorted(together.keys() & part.keys()):
            raise ValueError(f"metrics are reported twice: {', '.join(twice)}")
        together.update(part)
    return together
