"""Two models on the same prompts: the interval of their difference."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhf_core.evaluation.comparison import Completions, compare
from rlhf_core.evaluation.intervals import paired_difference


def rows(scores: list[list[float]]) -> list[dict[str, Any]]:
    """The first score of each prompt is of its greedy completion."""
    return [
        {"id": str(i), "completions": [{"scores": {"exact": score}} for score in prompt]}
        for i, prompt in enumerate(scores)
    ]


def test_what_both_find_hard_does_not_widen_the_interval() -> None:
    random.seed(0)
    before = [float(random.random() < 0.5) for _ in range(400)]
    after = [1.0 if index < 40 else score for index, score in enumerate(before)]
    found = paired_difference(before, after, seed=0)
    gained = sum(after) - sum(before)
    assert found.value == pytest.approx(gained / 400)
    share = gained / 400  # each difference is 0 or 1, so that their deviation is that of a share
    half = 1.96 * (share * (1 - share) / 400) ** 0.5
    assert (found.low, found.high) == pytest.approx((share - half, share + half), abs=0.005)


def test_equal_scores_leave_a_margin_for_other_prompts() -> None:
    found = paired_difference([1.0, 0.0] * 100, [1.0, 0.0] * 100, seed=0)
    assert found.value == 0
    assert found.low == -found.high == pytest.approx(-0.01884, abs=1e-5)  # Wilson's bound for 0 of 200


@pytest.mark.parametrize(("completions", "difference"), [("greedy", 1.0), ("sampled", -0.25)])
def test_greedy_or_sampled_scores_are_compared(completions: Completions, difference: float) -> None:
    before, after = rows([[0.0, 1.0, 0.5]] * 5), rows([[1.0, 0.5, 0.5]] * 5)
    assert compare(before, after, "exact", completions).value == pytest.approx(difference)


@pytest.mark.parametrize(
    ("before", "after", "scorer", "completions", "message"),
    [
        ([[0.0]] * 2, [[0.0]] * 3, "exact", "greedy", "have different prompts"),
        ([[0.0]] * 2, [[0.0]] * 2, "exact", "sampled", "has no sampled completions"),
        ([[0.0]] * 2, [[0.0]] * 2, "exakt", "greedy", "no scorer `exakt`; it has exact"),
    ],
)
def test_what_cannot_be_compared(
    before: list[list[float]], after: list[list[float]], scorer: str, completions: Completions, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(rows(before), rows(after), scorer, completions)
