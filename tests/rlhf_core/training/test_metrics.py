"""Sums and maxima over micro-batches; over two ranks they are in tests/rlhf_core/training/test_two_ranks.py."""

from __future__ import annotations

import torch

from rlhf_core.training.distributed import join_group
from rlhf_core.training.metrics import StepMetrics


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
