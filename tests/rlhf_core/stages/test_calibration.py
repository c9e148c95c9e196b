"""The stage `calibration`, whose judge is asked over a real connection on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.stages.calibration import CalibrationConfig
from rlhf_core.contract import Output
from rlhf_core.errors import StageError
from rlhf_core.stages import calibration
from rlhf_core.tracking.protocol import read_jsonl
from tests.rlhf_core.chat_endpoint import Endpoint, chat_endpoint, words_met
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import dataset

pytestmark = pytest.mark.parts

CRITERIA = [{"name": "right", "description": "has four"}, {"name": "polite", "description": "has please"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "2+2?"}], "completion": completion, "verdicts": verdicts}
    for completion, verdicts in (
        ("four, please", {"right": True, "polite": True}),
        ("four", {"right": True, "polite": True}),  # here the judge is stricter
        ("five", {"right": False, "polite": False}),
        ("five, please", {"right": False}),
    )
]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with chat_endpoint() as made:
        made.reply = words_met
        yield made


@pytest.fixture
def calibrate(endpoint: Endpoint, tmp_path: Path) -> Callable[..., Output]:
    (tmp_path / "rubric.json").write_text(json.dumps({"criteria": CRITERIA}))

    def run(rows: list[dict[str, Any]], reward: dict[str, Any] | None = None, **settings: Any) -> Output:
        judge = {"type": "rubric", "url": endpoint.url, "model": "wise", "path": "rubric.json", **(reward or {})}
        config = CalibrationConfig.model_validate_json(json.dumps({"dataset": "d", "reward": judge, **settings}))
        number = len(list(tmp_path.glob("run-*")))
        inputs = {"dataset": dataset(tmp_path / f"run-{number}-rows", rows)}
        return calibration.run(config, inputs, LocalContext(tmp_path / f"run-{number}", tmp_path))

    return run


def test_the_judge_is_compared_with_people_criterion_by_criterion(calibrate: Callable[..., Output]) -> None:
    output = calibrate(ROWS)
    document = json.loads((output.folder / "calibration.json").read_text())
    whole, polite = document["all"], document["criteria"]["polite"]
    # By both: right twice, polite once. By people alone: polite once. By neither: right twice, polite once.
    assert [whole[name] for name in ("rows", "verdicts", "both_met", "judge_alone", "people_alone", "neither")] == [
        4, 7, 3, 0, 1, 3,
    ]  # fmt: skip
    assert (polite["both_met"], polite["people_alone"], polite["neither"]) == (1, 1, 1)
    assert output.metrics["agreement"] == pytest.approx(6 / 7)
    assert output.metrics["kappa"] == pytest.approx((6 / 7 - 24 / 49) / (1 - 24 / 49))  # 3/7 * 4/7 + 4/7 * 3/7
    assert output.metrics["right/kappa"] == 1.0
    assert output.metrics["polite/kappa"] == pytest.approx((2 / 3 - 4 / 9) / (1 - 4 / 9))
    lines = {json.dumps(line["people"]): line["judge"] for line in read_jsonl(output.folder / "verdicts.jsonl")}
    assert lines['{"right": false}'] == {"right": False, "polite": True}


def test_a_judge_that_agrees_too_little_fails_the_stage(calibrate: Callable[..., Output]) -> None:
    with pytest.raises(
        StageError, match=r"the judge wise agrees with people by a kappa of 0\.72 \(.* to .*\) on 7 verd"
    ):
        calibrate(ROWS, least_kappa=0.9)
    assert calibrate(ROWS, least_kappa=-0.9).metrics["verdicts"] == 7


def test_a_group_s_judge_sees_the_completions_of_a_prompt_together(
    endpoint: Endpoint, calibrate: Callable[..., Output]
) -> None:
    other = {**ROWS[0], "prompt": [{"role": "user", "content": "1+3?"}]}
    output = calibrate([*ROWS, other], {"type": "group_rubric"})
    assert output.metrics["rows"] == 5
    shown = [re["response_format"]["json_schema"]["schema"]["properties"] for re in endpoint.requests]
    assert sorted(map(len, shown)) == [1, 4]


def test_failures_of_the_judge_are_bounded(endpoint: Endpoint, calibrate: Callable[..., Output]) -> None:
    endpoint.reply = lambda text: "?" if "five, please" in text else words_met(text)
    with pytest.raises(StageError, match="the reply is not the JSON that was asked for"):
        calibrate(ROWS)
    assert calibrate(ROWS, {"tolerated_failures": 0.3}).metrics["failures"] == 1
    with pytest.raises(StageError, match="the judge failed for 1 of 4 rows; the first: judge http"):
        calibrate(ROWS, {"tolerated_failures": 0.2})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": None}, "the column `completion` has no completion: None"),
        ({"verdicts": {}}, "the column `verdicts` must map criteria to true or false, this is {}"),
        (
            {"verdicts": {"rihgt": True}},
            "`verdicts.rihgt` is not a criterion (did you mean `right`?); there are right, polite",
        ),
        ({"verdicts": {"right": 1}}, "`verdicts.right` is 1, expected true or false"),
    ],
)
def test_rows_without_verdicts_are_errors(calibrate: Callable[..., Output], row: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError) as raised:
        calibrate([{**ROWS[0], **row}])
    assert message in str(raised.value)
    assert str(raised.value).startswith("row ")
