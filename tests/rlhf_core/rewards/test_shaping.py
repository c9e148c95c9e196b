from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.rl.shaping import OverlongConfig, ShapingConfig
from rlhf_core.rewards.shaping import RunningMoments, Shaping, overlong_penalty


def shaping(**settings: Any) -> Shaping:
    return Shaping(ShapingConfig.model_validate(settings), max_tokens=20)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16, 0.0), (17, 0.125), (18, 0.25), (19, 0.375), (20, 0.5), (25, 0.5)]
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    """Eq. 13 with L_max = 20 and L_cache = 4, times 0.5."""
    assert overlong_penalty(length, 20, OverlongConfig(buffer=4, penalty=0.5)) == penalty


def test_nothing_set_changes_nothing() -> None:
    assert shaping()([3.0, -2.0], [20, 1], [True, False]) == [3.0, -2.0]


def test_a_factor_takes_from_positive_rewards_and_never_makes_being_cut_pay() -> None:
    cut = shaping(truncation={"factor": 0.5})
    assert cut([2.0, 2.0, -2.0], [20, 5, 20], [True, False, True]) == [1.0, 2.0, -2.0]


def test_a_fixed_reward_replaces_that_of_a_cut_completion() -> None:
    assert shaping(truncation={"reward": -1.0})([2.0, 2.0], [20, 5], [True, False]) == [-1.0, 2.0]


def test_the_order_is_overlong_truncation_clip_normalisation() -> None:
    shape = shaping(
        overlong={"buffer": 10, "penalty": 1.0}, truncation={"factor": 0.5}, clip=(-1.0, 0.3), normalize=True
    )
    # 2.0 - 1.0 = 1.0, halved 0.5, clipped 0.3; 0.5 - 0.5 = 0.0; -3.0 clipped -1.0; 0.1.
    # Mean (0.3 + 0.0 - 1.0 + 0.1) / 4 = -0.15, squares 0.2025 + 0.0225 + 0.7225 + 0.0625 = 1.01, deviation 0.50249...
    given = shape([2.0, 0.5, -3.0, 0.1], [20, 15, 3, 4], [True, False, False, False])
    deviation = (1.01 / 4) ** 0.5
    assert given == pytest.approx([0.45 / deviation, 0.15 / deviation, -0.85 / deviation, 0.25 / deviation])


def test_normalisation_is_over_the_run_so_far() -> None:
    shape = shaping(normalize=True)
    assert shape([1.0, 3.0], [1, 1], [False, False]) == [-1.0, 1.0]  # mean 2, deviation 1
    # Of 1, 3, 5, 7 the mean is 4 and the variance 5.
    assert shape([5.0, 7.0], [1, 1], [False, False]) == pytest.approx([1 / 5**0.5, 3 / 5**0.5])


def test_the_first_batch_is_defined_even_when_all_rewards_are_equal() -> None:
    shape = shaping(normalize=True)
    assert shape([0.1], [1], [False]) == [0.0]
    assert shape([0.1] * 3, [1] * 3, [False] * 3) == [0.0] * 3  # 0.1 + 0.1 + 0.1 is not 0.3 in binary
    assert shape([0.4], [1], [False])[0] == pytest.approx(2.0)  # 0.1 four times, 0.4: mean 0.16, deviation 0.12


def test_the_state_goes_through_json_to_the_bit() -> None:
    one, two = shaping(normalize=True), shaping(normalize=True)
    one([0.1, 0.7, 1 / 3], [1, 2, 3], [False] * 3)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one([2.0, 0.3], [1, 1], [False] * 2) == two([2.0, 0.3], [1, 1], [False] * 2)


numbers = st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: round(value, 3))


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5))
def test_moments_of_batches_are_those_of_all_values(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.add(batch)
    values = [value for batch in batches for value in batch]
    if len(set(values)) < 2:
        assert moments.normalised(values[0] if values else 0.0) == 0.0
        return
    expected = (values[0] - statistics.fmean(values)) / statistics.pstdev(values)
    assert moments.normalised(values[0]) == pytest.approx(expected, rel=1e-6, abs=1e-6)
