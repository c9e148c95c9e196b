"""Accuracy, margin and calibration of rewards, worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlhf_core.evaluation.intervals import wilson
from rlhf_core.evaluation.ranking import Ranked, flat_metrics, rank, reliability

LOG_3 = math.log(3)  # a margin with the confidence 3/4
ROWS = [
    Ranked("chat", [LOG_3], [0.0]),
    Ranked("chat", [1.0], [1.0]),  # a tie is wrong
    Ranked("code", [0.0], [LOG_3]),
    Ranked("code", [2.0, 5.0], [1.0, 1.5, 0.0]),
]


def test_a_prompt_is_right_if_every_chosen_completion_is_above_every_rejected_one() -> None:
    result = rank(ROWS, seed=0)
    assert [row.is_right for row in ROWS] == [True, False, False, True]
    overall = result["all"]
    assert (overall["prompts"], overall["pairs"], overall["ties"]) == (4, 9, 1)
    expected = wilson(2, 4)
    assert overall["accuracy"] == {"value": 0.5, "low": expected.low, "high": expected.high}
    # Of the last prompt: 1, 0.5, 2, 4, 3.5, 5, in the mean 16/6.
    assert overall["margin"]["value"] == pytest.approx((LOG_3 + 0 - LOG_3 + 16 / 6) / 4)
    assert {name: each["accuracy"]["value"] for name, each in result["subsets"].items()} == {"chat": 0.5, "code": 0.5}
    assert result["subsets"]["chat"]["prompts"] == 2


def test_the_calibration_error_is_the_distance_of_confidence_and_share() -> None:
    """Three pairs of confidence 3/4, of which two are right, and a tie, which is half right with confidence 1/2."""
    (tie, likely) = reliability([LOG_3, -LOG_3, 0.0, LOG_3])
    assert tie == {"pairs": 1, "confidence": 0.5, "right": 0.5}
    assert likely == {"pairs": 3, "confidence": pytest.approx(0.75), "right": pytest.approx(2 / 3)}
    result = rank([Ranked("all", [margin], [0.0]) for margin in (LOG_3, -LOG_3, 0.0, LOG_3)], seed=0)["all"]
    assert result["ece"] == pytest.approx(3 / 4 * (3 / 4 - 2 / 3))
    losses = [math.log(4 / 3), math.log(4), math.log(2), math.log(4 / 3)]
    assert result["log_loss"] == pytest.approx(sum(losses) / 4)


def test_a_calibrated_model_has_no_error_and_extreme_margins_are_no_overflow() -> None:
    rows = [Ranked("all", [margin], [0.0]) for margin in (LOG_3, LOG_3, LOG_3, -LOG_3)]
    assert rank(rows, seed=0)["all"]["ece"] == pytest.approx(0.0)
    assert list(reliability([1e6, -1e6])) == [{"pairs": 2, "confidence": 1.0, "right": 0.5}]


def test_metrics_of_the_manifest_begin_with_the_first_reward() -> None:
    results = {"mine": rank(ROWS, seed=0), "theirs": rank(ROWS[:2], seed=0)}
    metrics = flat_metrics(results)
    assert list(metrics)[:3] == ["accuracy", "accuracy_low", "accuracy_high"]
    assert metrics["accuracy/code"] == metrics["accuracy_of_subsets"] == 0.5
    assert metrics["ties"] == metrics["theirs/ties"] == 1
    assert "theirs/accuracy/chat" not in metrics  # its only subset
