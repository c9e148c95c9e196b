"""Reductions over micro-batches and steps; over two ranks they are in tests/rlhf_core/training/test_two_ranks.py."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.metrics import Max, Sum, TokenMean, merged
from rlhf_core.training.distributed import join_group
from rlhf_core.training.metrics import MetricTotals, StepMetrics, of_batch, over_steps

pytestmark = pytest.mark.parts

CPU = torch.device("cpu")


def test_every_type_is_reduced_its_own_way() -> None:
    join_group(rank=0, size=1)
    totals = MetricTotals()
    totals.add({"a": Sum(torch.tensor(3)), "b": TokenMean(torch.tensor(1.0)), "c": Max(torch.tensor(-2.0))}, 1)
    totals.add({"a": Sum(torch.tensor(4)), "b": TokenMean(torch.tensor(4.0)), "c": Max(torch.tensor(-5.0))}, 3)
    assert totals.over_replicas(CPU) == ({"a": 7.0, "b": 1.25}, {"c": -2.0})


def test_no_metrics_are_none_and_no_tokens_give_a_mean_of_zero() -> None:
    join_group(rank=0, size=1)
    totals = MetricTotals()
    totals.add({}, 0)
    assert totals.over_replicas(CPU) == ({}, {})
    assert of_batch({"b": TokenMean(torch.tensor(0.0))}, 0) == {"b": 0.0}


def test_a_metric_carries_no_graph_and_is_summed_in_float64() -> None:
    join_group(rank=0, size=1)
    totals = MetricTotals()
    totals.add({"loss": Sum(torch.tensor(1.0, requires_grad=True) * 2**25)}, 1)
    totals.add({"loss": Sum(torch.tensor(1.0))}, 1)
    assert totals.over_replicas(CPU) == ({"loss": 2.0**25 + 1}, {})


def test_steps_that_were_skipped_are_counted_and_not_averaged() -> None:
    steps = [
        StepMetrics(1.0, 0.1, skipped=False, means={"loss": 1.0}, maxima={"ratio": 3.0}),
        StepMetrics(math.inf, 0.2, skipped=True, means={"loss": math.nan}, maxima={"ratio": math.inf}),
        StepMetrics(2.0, 0.3, skipped=False, means={"loss": 2.0}, maxima={"ratio": 2.0}),
    ]
    assert over_steps(steps) == {
        "loss": 1.5, "ratio": 3.0, "gradient_norm": 1.5, "learning_rate": 0.2, "skipped_updates": 1.0,
    }  # fmt: skip
    skipped = over_steps(steps[1:2] * 2)
    assert math.isnan(skipped["loss"])
    assert skipped["skipped_updates"] == 2.0
    own = {"critic_gradient_norm", "critic_learning_rate", "critic_skipped_updates"}
    assert over_steps(steps, prefix="critic_").keys() == {"loss", "ratio", *own}


def test_a_name_that_is_reported_twice_is_an_error() -> None:
    assert merged({"a": 1}, {}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="metrics are reported twice: a, b"):
        merged({"a": 1, "b": 2, "c": 3}, {"b": 1, "a": 1})
    with pytest.raises(ValueError, match="twice: loss"):
        over_steps([StepMetrics(1.0, 0.1, skipped=False, means={"loss": 1.0}, maxima={"loss": 1.0})])
