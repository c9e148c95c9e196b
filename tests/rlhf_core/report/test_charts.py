"""The charts of the pages: curves by question, thinned, with the events of a stage's attempts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rlhf_core.artifacts.attempt import Attempt, AttemptOutcome
from rlhf_core.report.charts import curve_charts, grouped, marks
from rlhf_core.report.content import Curves

AT = datetime(2026, 11, 1, tzinfo=UTC)


def test_curves_are_grouped_by_question_and_long_ones_thinned_to_their_last_point() -> None:
    curves: Curves = {
        "kl": [(step, float(step)) for step in range(5001)], "reward/a": [(0, 1.0), (1, 2.0)],
        "reward/b": [(0, 1.0), (1, float("nan")), (2, 3.0)], "other/x": [(0, 1.0), (1, 3.0)],
        "constant": [(0, 4.0), (1, 4.0)],
    }  # fmt: skip
    found = grouped(curves)
    assert {title: list(lines) for title, lines in found.charts.items()} == {
        "reward and KL": ["kl"], "rewards by name": ["reward/a", "reward/b"], "other": ["other/x"],
    }  # fmt: skip
    assert found.constants == {"constant": 4.0}
    drawn = {chart["title"]: chart["lines"] for chart in curve_charts(found.charts)}
    (kl,) = drawn["reward and KL"]
    assert (kl["x"][-1], len(kl["x"]) <= 2001) == (5001, True)
    assert not kl["right"]  # nothing is on the left
    assert drawn["rewards by name"][1]["y"] == [1.0, 3.0]


def attempt(outcome: AttemptOutcome, step: int | None, resumed_after: int | None = None, **fields: Any) -> Attempt:
    return Attempt(
        id="a", host="h", device="cpu", gpus=0, cores=1, started_at=AT, seen_at=AT, outcome=outcome, step=step,
        resumed_after=resumed_after, **fields,
    )  # fmt: skip


def test_attempts_mark_the_steps_where_they_ended_and_were_resumed() -> None:
    found = marks([attempt("killed", 12), attempt("preempted", None, 10), attempt("published", 20, 10)])
    assert [(each["step"], each["text"]) for each in found] == [
        (10, "resumed from the checkpoint"), (10, "resumed from the checkpoint"), (12, "killed"),
    ]  # fmt: skip
    assert marks([attempt("running", 5)]) == []


def test_checkpoints_and_the_reason_of_an_end_are_marked() -> None:
    refused = "engine 0 does not serve version 7 as published"
    found = marks(
        [attempt("failed", 6, checkpoints=(4, 6), reason=refused), attempt("running", 9, 6, checkpoints=(8,))]
    )
    assert [(each["step"], each["text"]) for each in found] == [
        (4, "checkpoint"), (6, "failed: engine 0 does not serve version 7 as published"),
        (6, "resumed from the checkpoint"), (6, "checkpoint"), (8, "checkpoint"),
    ]  # fmt: skip
    assert [each["kind"] for each in found] == ["checkpoint", "end", "resume", "checkpoint", "checkpoint"]
    assert marks([attempt("published", 41, checkpoints=tuple(range(1, 42)))]) == []


def test_kl_has_an_axis_of_its_own_beside_rewards() -> None:
    points: Curves = {name: [(0, 1.0), (1, 2.0)] for name in ("kl", "reward", "filtering/kept_share")}
    found = grouped(points)
    (first, shares) = curve_charts(found.charts)
    assert [(line["name"], line["right"]) for line in first["lines"]] == [("reward", False), ("kl", True)]
    assert shares["title"] == "solved, mixed and hopeless prompts"
