"""Runs compared: what differs by field, and evaluations only where the prompts and scorers are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import stage_cost
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.prices import PricesConfig
from rlhf_core.report.run_diff import ComparedRun, FieldDifference, Rows, RunStage, diff_runs, own_costs
from tests.rlhf_core.artifacts.manifests import manifest

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def rows(scores: Mapping[str, float], prompt: str = "What is") -> Rows:
    return [
        {
            "id": name,
            "prompt": f"{prompt} {name}?",
            "answer": "4",
            "completions": [{"text": f"{score:g}", "scores": {"exact": score}}],
        }
        for name, score in scores.items()
    ]


def compared(run: str, rate: float, evaluated: Rows, **changes: Any) -> ComparedRun:
    config = {"scorers": {"exact": {"type": "verifier"}}} | changes.pop("config", {})
    manifests = {
        "sft": manifest(f"sft {rate}", metrics={"loss": rate}, **changes).model_copy(update={"name": "sft"}),
        "evaluation.sft": manifest(
            f"evaluation {rate}", "evaluation", kind=Kind.EVALUATION, config=config, metrics={"pass@1": rate}
        ),
    }
    return ComparedRun(
        run, {"name": "r", "sft": {"lr": rate, "kept": [1]}}, (f"sft.lr={rate}",), NOW, NOW + timedelta(seconds=60),
        {name: RunStage(each.ref, "computed", each) for name, each in manifests.items()},
        {"evaluation.sft": evaluated},
    )  # fmt: skip


def test_what_differs_is_listed_by_field() -> None:
    later: dict[str, Any] = {
        "user_files": {"reward.py": "b" * 64},
        "libraries": {"torch": "3"},
        "code_revision": "def",
        "finished_at": NOW + timedelta(seconds=10),
    }
    scored = rows({"a": 1.0})
    content = diff_runs([compared("one", 0.5, scored), compared("two", 0.75, scored, **later)], samples=1)
    found = {(each.section, each.field): each.values for each in content.differences}
    assert found == {
        ("settings", "sft.lr"): [0.5, 0.75],
        ("inputs", "file reward.py"): [None, "b" * 64],
        ("inputs", "artifact evaluation.sft"): found["inputs", "artifact evaluation.sft"],
        ("code", "revision"): ["abc", "abc, def"],
        ("libraries", "torch"): ["2", "2, 3"],
    }
    assert [(row.stage, row.metric, row.values) for row in content.metrics] == [("sft", "loss", [0.5, 0.75])]
    (sft, _) = content.times
    assert (sft.seconds, sft.device_seconds, sft.outcomes) == ([0.0, 10.0], [1.5, 1.5], ["computed", "computed"])
    assert diff_runs([compared("one", 0.5, scored), compared("two", 0.5, scored)], samples=1).differences == []
    assert FieldDifference("settings", "sft.lr", [0.5, 0.75]) in content.differences


def test_each_run_has_what_its_own_attempts_took_and_what_reuse_saved() -> None:
    attempt = Attempt(
        id="a", run_id="one", host="h", device="H100", gpus=2, cores=4, started_at=NOW,
        seen_at=NOW + timedelta(hours=1), outcome="published", energy={"gpu": 7.2e6},
    )  # fmt: skip
    prices = PricesConfig(currency="EUR", gpus={"H100": 3.0})
    one, two = (
        replace(
            compared(run, 0.5, rows({"a": 1.0})), prices=prices,
            costs=[stage_cost("sft", "computed" if run == "one" else "reused", [attempt], run, prices)],
        )
        for run in ("one", "two")
    )  # fmt: skip
    old = replace(one, costs=[stage_cost("sft", "computed", [], "one", prices)])
    content = diff_runs([one, two, old], samples=1)
    assert [(head.money, head.saved_money) for head in content.runs] == [(6.0, 0.0), (0.0, 6.0), (None, None)]
    assert own_costs(content.runs) == [
        ("GPU hours", ["2", "0", ""]), ("core hours", ["4", "0", ""]), ("energy", ["2 kWh gpu", "", ""]),
        ("cost", ["6.00 EUR", "0.00 EUR", ""]), ("saved by reuse", ["", "6.00 EUR", ""]),
    ]  # fmt: skip


def test_evaluations_are_paired_by_prompt_and_the_largest_changes_are_shown() -> None:
    before = rows({"a": 1.0, "b": 0.5, "c": 0.0, "d": 1.0})
    after = rows({"d": 0.75, "c": 0.25, "b": 0.5, "a": 0.0})  # in another order
    (evaluation,) = diff_runs([compared("one", 0.5, before), compared("two", 0.75, after)], samples=1).evaluations
    (difference,) = evaluation.differences
    assert (difference.run, difference.value, difference.prompts) == ("two", -0.25, 4)
    assert difference.low < -0.25 < difference.high
    assert [(each.id, each.score_before, each.score_after) for each in evaluation.worse] == [("a", 1.0, 0.0)]
    assert [(each.id, each.before, each.after) for each in evaluation.better] == [("c", "0", "0.25")]
    assert (evaluation.metrics[0].metric, evaluation.metrics[0].values) == ("pass@1", [0.5, 0.75])


@pytest.mark.parametrize(
    ("evaluated", "changes", "why"),
    [
        (rows({"a": 1.0}, prompt="How much is"), {}, "other prompts"),
        (rows({"b": 1.0}), {}, "other prompts"),
        (rows({"a": 1.0}), {"config": {"scorers": {"exact": {"type": "function"}}}}, "other scorers"),
        ([], {}, "the run two has no such evaluation"),
    ],
)
def test_evaluations_of_other_prompts_or_scorers_are_not_paired_but_shown(
    evaluated: Rows, changes: dict[str, Any], why: str
) -> None:
    runs = [compared("one", 0.5, rows({"a": 1.0})), compared("two", 0.75, evaluated, **changes)]
    (evaluation,) = diff_runs(runs, samples=1).evaluations
    assert evaluation.not_paired == {"two": why}
    assert (evaluation.differences, evaluation.worse, evaluation.better) == ([], [], [])
    assert evaluation.metrics[0].values == [0.5, 0.75]


def test_a_run_whose_results_are_gone_is_compared_as_far_as_it_goes() -> None:
    first = compared("one", 0.5, rows({"a": 1.0}))
    gone = {name: RunStage(stage.ref, "computed", None) for name, stage in first.stages.items()}
    second = ComparedRun("two", first.recipe, (), NOW, NOW, gone, {})
    content = diff_runs([first, second], samples=1)
    assert content.times[0].seconds == [0.0, None]
    assert content.evaluations[0].not_paired == {"two": "the run two has no such evaluation"}
