"""Sums and maxima over micro-batches; over two ranks they are in tests/rlhf_core/training/test_two_ranks.py."""

from __future__ import annotations

import math

import torch

from rlhf_core.training.distributed import join_group
from rlhf_core.training.metrics import StepMetrics, mean_over_steps


def test_metrics_are_summed_and_those_named_max_are_maxima() -> None:
    join_group(rank=0, size=1)
    metrics = StepMetrics()
    metrics.add({"tokens": torch.tensor(3), "ratio_max": torch.tensor(-2.0)})
    metrics.add({"tokens": torch.tensor(4), "ratio_max": torch.tensor(-5.0)})
    assert metrics.over_ranks(torch.device("cpu")) == {"tokens": 7.0, "ratio_max": -2.0}


def test_no_metrics_are_none() -> None:
    join_group(rank=0, size=1)
    assert StepMetrics().over_ranks(torch.device("cpu")) == {}


def test_a_metric_carries_no_graph_and_is_summed_in_float64() -> None:
    join_group(rank=0, size=1)
    metrics = StepMetrics()
    metrics.add({"loss": torch.tensor(1.0, requires_grad=True) * 2**25})
    metrics.add({"loss": torch.tensor(1.0)})
    assert metrics.over_ranks(torch.device("cpu")) == {"loss": 2.0**25 + 1}


def test_steps_that_were_skipped_are_counted_and_not_averaged() -> None:
    steps = [
        {"loss": 1.0, "ratio_max": 3.0, "skipped_updates": 0.0},
        {"loss": math.nan, "ratio_max": math.inf, "skipped_updates": 1.0},
        {"loss": 2.0, "ratio_max": 2.0, "skipped_updates": 0.0},
    ]
    assert mean_over_steps(steps) == {"loss": 1.5, "ratio_max": 3.0, "skipped_updates": 1.0}
    skipped = mean_over_steps(steps[1:2] * 2)
    assert math.isnan(skipped["loss"])
    assert skipped["skipped_updates"] == 2.0
