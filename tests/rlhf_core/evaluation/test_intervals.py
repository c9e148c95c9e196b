from __future__ import annotations

import math
import random

import numpy as np
import pytest

from rlhf_core.evaluation.intervals import bootstrap, cluster_bootstrap, wilson


def test_wilson_against_values_computed_by_hand() -> None:
    # 8 of 10, z² = 3.841459: centre (0.8 + 0.192073) / 1.384146, half 1.959964 / 1.384146 * sqrt(0.016 + 0.009604)
    middle = wilson(8, 10)
    assert middle.value == 0.8
    assert (middle.low, middle.high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    none = wilson(0, 10)  # high is z² / (n + z²)
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))
    every = wilson(10, 10)
    assert (every.value, every.low, every.high) == (1.0, pytest.approx(10 / 13.841459, abs=1e-6), 1.0)


@pytest.mark.parametrize(("passed", "count"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(passed: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{passed} of {count} passed"):
        wilson(passed, count)


def test_bootstrap_of_equal_values_is_as_wide_as_wilsons_interval() -> None:
    different = 3.841459 / 23.841459  # z² / (n + z²): the share of other prompts that 20 alike leave possible
    half = cluster_bootstrap([0.5] * 20, seed=0)
    assert half.value == 0.5
    assert (half.low, half.high) == pytest.approx((0.5 - 0.5 * different, 0.5 + 0.5 * different), abs=1e-6)
    for value, passed in ((0.0, 0), (1.0, 20)):
        found, expected = cluster_bootstrap([value] * 20, seed=0), wilson(passed, 20)
        assert (found.value, found.low, found.high) == pytest.approx((value, expected.low, expected.high))
    assert cluster_bootstrap([0.25], seed=0).high > 0.8, "one prompt says little"


def test_bootstrap_is_about_two_standard_errors_wide_and_repeats() -> None:
    generator = random.Random(1)
    values = [generator.random() for _ in range(400)]
    mean = sum(values) / 400
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / 400 / 400)
    found = cluster_bootstrap(values, seed=3)
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert cluster_bootstrap(values, seed=3) == found


def test_samples_of_one_prompt_do_not_count_as_prompts() -> None:
    """8 samples of each of 10 prompts, all alike within a prompt: as wide as 10 values, not as 80."""
    per_prompt = cluster_bootstrap([0.0] * 5 + [1.0] * 5, seed=0)
    as_if_independent = wilson(40, 80)
    assert per_prompt.high - per_prompt.low > 2.5 * (as_if_independent.high - as_if_independent.low)


@pytest.mark.parametrize("count", [2, 41, 3001])
def test_bounds_are_those_of_resamples_drawn_one_by_one(count: int) -> None:
    values, generator = np.random.default_rng(1).random(count), np.random.default_rng(0)
    means = [generator.choice(values, size=count).mean() for _ in range(2000)]
    found = bootstrap(list(values), seed=0)
    assert (found.low, found.high) == tuple(np.quantile(means, [0.025, 0.975]))


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_bootstrap_of_what_is_no_share_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="outside 0-1"):
        cluster_bootstrap([0.5, value], seed=0)


def test_bootstrap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        cluster_bootstrap([], seed=0)
