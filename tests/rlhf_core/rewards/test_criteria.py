"""Criteria of rubrics, and the reward of those that are met, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards.rubrics import Criterion
from rlhf_core.errors import RewardError
from rlhf_core.rewards.criteria import criteria_of_row, read_rubric, total


def criterion(weight: float, *, required: bool = False) -> Criterion:
    return Criterion(name=f"c{weight}", description="good", weight=weight, required=required)


@pytest.mark.parametrize(
    ("criteria", "met", "reward"),
    [
        ([criterion(3.0), criterion(1.0)], (True, False), 0.75),
        ([criterion(3.0), criterion(1.0), criterion(-2.0)], (True, True, True), 0.5),  # a fault costs 2 of 4
        ([criterion(1.0), criterion(-2.0)], (True, True), 0.0),  # clipped
        ([criterion(3.0), criterion(1.0, required=True)], (True, False), 0.0),
        ([criterion(3.0), criterion(0.0, required=True)], (True, True), 1.0),
    ],
)
def test_the_reward_is_the_share_of_the_weights(
    criteria: list[Criterion], met: tuple[bool, ...], reward: float
) -> None:
    assert total(criteria, met) == reward


def test_criteria_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rubric.yaml"
    file.write_text("criteria:\n- {name: right, description: It is right., weight: 2, required: true}\n"
                    "- {name: rude, description: It is rude., weight: -1}\n")  # fmt: skip
    assert read_rubric(file) == (
        Criterion(name="right", description="It is right.", weight=2.0, required=True),
        Criterion(name="rude", description="It is rude.", weight=-1.0),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("criteria: [", "not valid YAML"),
        ("- a", "expected a mapping with the key `criteria` alone"),
        ("criteria: []", "criteria must be a list of criteria, this is []"),
        ("criteria: [good]", "criteria, criterion 1: expected a mapping, this is good"),
        ("criteria: [{name: a}]", "criteria, criterion 1: `description`: Field required"),
        ("criteria: [{description: x, wight: 1}]", "criteria, criterion 1: `wight`: Extra inputs are not permitted"),
        ("criteria: [{description: x, weight: 1001}]", "criterion 1: `weight`: it must be from -1000 to 1000"),
        ("criteria: [{description: x, weight: -1, required: true}]", "1 is required, but its weight is -1: a fault"),
        ("criteria: [{name: a, description: x}, {name: a, description: y}]", "two criteria with the name 'a'"),
        ("criteria: [{name: a b, description: x}]", "the name 'a b' is to be part of a metric's"),
        ("criteria: [{name: met, description: x}]", "the name `met` is that of another metric"),
    ],
)
def test_a_file_that_is_no_rubric(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rubric.yaml").write_text(text)
    with pytest.raises(RewardError) as raised:
        read_rubric(tmp_path / "rubric.yaml")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        [{"criterion": "It is right.", "points": 5, "tags": ["axis:accuracy"]}],  # HealthBench
        [{"title": "1", "description": "It is right.", "weight": 5}],  # Rubrics as Rewards
        '[{"description": "It is right.", "weight": 5}]',
    ],
)
def test_rows_of_other_data_sets_are_read_as_they_are(value: Any) -> None:
    assert criteria_of_row({"rubric": value}, "rubric") == (
        Criterion(name="1", description="It is right.", weight=5.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "r"}, "row r: `rubric` must be a list of criteria, this is None"),
        ({"id": "r", "rubric": "["}, "row r: not JSON"),
        ({"id": "r", "rubric": [{"title": "a", "name": "b", "description": "x"}]}, "two names for one thing in title"),
    ],
)
def test_a_row_without_criteria_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as raised:
        criteria_of_row(row, "rubric")
    assert message in str(raised.value)
