"""The report from artifacts on disk: what it says, what it escapes, that it is one file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.contract import Input
from rlhf_core.report.content import gather
from rlhf_core.report.page import render

START = datetime(2026, 1, 1, tzinfo=UTC)


def artifact(folder: Path, kind: Kind, key: str, parents: dict[str, tuple[str, str]], metrics: dict[str, Any]) -> Input:
    folder.mkdir(parents=True)
    manifest = Manifest(
        kind=kind, name=folder.name, stage=kind.value, key=key * 64, files=(),
        parents={name: ArtifactRef(stage=stage, key=k * 64) for name, (stage, k) in parents.items()},
        config={}, seed=0, metrics=metrics, code_revision="abc", libraries={"torch": "1"}, device_seconds=20.0,
        device="cpu", started_at=START, finished_at=START + timedelta(seconds=10),
    )  # fmt: skip
    return Input(manifest, folder)


def evaluation(folder: Path, key: str, model: str, scores: list[float]) -> Input:
    item = artifact(
        folder, Kind.EVALUATION, key, {"model": (model, "a")}, {"pass@1": sum(scores) / len(scores), "prompts": 40.0}
    )
    rows = [
        {"id": str(i), "prompt": f"<b>question {i}</b>", "answer": "4",
         "completions": [{"text": f"{key}{i}", "scores": {"exact": score}}]}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    (item.folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return item


@pytest.fixture
def nodes(tmp_path: Path) -> dict[str, Input]:
    sft = artifact(tmp_path / "sft", Kind.POLICY, "a", {}, {"loss": 0.25})
    lines = [{"step": s, "loss": 1.0 / (s + 1), "seconds/rollout": 0.5} for s in range(3)]
    (sft.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "sft": sft,
        "evaluation.sft": evaluation(tmp_path / "e.sft", "b", "policy", [0.0] * 20 + [1.0] * 20),
        "evaluation.rl": evaluation(tmp_path / "e.rl", "c", "policy", [1.0] * 40),
    }


def test_differences_are_paired_by_prompt(nodes: dict[str, Input]) -> None:
    (found,) = gather(nodes, samples=2).sets
    (difference,) = found.differences
    assert (difference.before, difference.after, difference.mean, difference.prompts) == ("sft", "rl", 0.5, 40)
    assert 0.3 < difference.low < 0.5 < difference.high < 0.7


def test_the_result_is_the_last_model_s_by_the_main_scorer(nodes: dict[str, Input], tmp_path: Path) -> None:
    nodes["evaluation.last"] = evaluation(tmp_path / "e.last", "d", "policy", [1.0] * 10 + [0.0] * 30)
    for name in [name for name in nodes if name.startswith("evaluation.")]:
        file = nodes[name].folder / "samples.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["completions"][0]["scores"]["other"] = 0.0
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = gather(nodes, samples=2).sets
    assert found.result is not None
    assert (found.result.scorer, found.result.before, found.result.after) == ("exact", "sft", "last")
    assert found.result.mean == -0.25


def test_a_gate_s_verdict_is_said_first(nodes: dict[str, Input], tmp_path: Path) -> None:
    models = {"candidate": ("rl", "c"), "baseline": ("sft", "b")}
    gate = artifact(tmp_path / "gate", Kind.GATE, "d", models, {"accepted": 0, "reason": "no"})
    comparison = {
        "metric": "<b>style</b>", "completions": "greedy", "value": -0.5, "low": -0.6, "high": -0.4, "prompts": 40,
        "passed": False, "reason": "the lower end is below -0.010",
    }  # fmt: skip
    verdict = {"accepted": False, "reason": "no", "comparisons": [comparison]}
    (gate.folder / "verdict.json").write_text(json.dumps(verdict))
    old = artifact(tmp_path / "old", Kind.ROUND, "e", {"candidate": ("rl", "c"), "accepted": ("sft", "b")}, {})
    (old.folder / "verdict.json").write_text(json.dumps({"accepted": True, "reason": "of an earlier <release>"}))
    content = gather({**nodes, "gate": gate, "round": old}, samples=2)
    page = render(content, title="t", revision="abc", libraries={})
    first, second, rest = page.split("<h2>", 3)[1:]
    assert first.startswith("gate: refused</h2>")
    assert "rl/cccccccccccc, compared with sft/bbbbbbbbbbbb" in first
    assert "&lt;b&gt;style&lt;/b&gt;" in first
    assert "[-0.600, -0.400]" in first
    assert second.startswith("round: passed</h2>")
    assert "of an earlier &lt;release&gt;" in second
    assert rest.startswith("Evaluation on held-out prompts")


def test_only_evaluations_of_the_same_prompts_are_compared(nodes: dict[str, Input], tmp_path: Path) -> None:
    far = evaluation(tmp_path / "far", "d", "policy", [1.0] * 3)
    nodes["evaluation_far.rl"] = far
    nodes["evaluation_far.sft"] = evaluation(tmp_path / "far.sft", "e", "policy", [0.0] * 3)
    content = gather(nodes, samples=2)
    near, more = content.sets
    assert [(found.name, found.prompts, list(found.evaluations)) for found in content.sets] == [
        ("evaluation", 40, ["sft", "rl"]), ("evaluation_far", 3, ["rl", "sft"]),
    ]  # fmt: skip
    assert [(d.before, d.after, d.mean) for d in (*near.differences, *more.differences)] == [
        ("sft", "rl", 0.5), ("rl", "sft", -1.0),
    ]  # fmt: skip
    assert [list(row.completions) for row in (*near.samples, *more.samples)] == [["sft", "rl"]] * 2 + [
        ["rl", "sft"]
    ] * 2
    page = render(content, title="t", revision="abc", libraries={})
    first, second = page.split("<h2>Evaluation on held-out prompts: ")[1:]
    assert first.startswith("evaluation</h2>")
    assert second.startswith("evaluation_far</h2>")
    assert "<td>–</td>" not in page


def test_blank_completions_are_seen_and_counted(nodes: dict[str, Input]) -> None:
    blank = [{"id": str(i), "prompt": f"<b>question {i}</b>", "answer": "4",
              "completions": [{"text": "\n" * 16, "scores": {"exact": 0.0}}, {"text": "", "scores": {"exact": 0.0}}]}
             for i in range(40)]  # fmt: skip
    path = nodes["evaluation.sft"].folder / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in blank))
    (found,) = gather(nodes, samples=1).sets
    assert found.blank == {"sft": "80 of 80", "rl": "0 of 40"}
    assert found.notes == [
        "sft: all 80 completions are blank: the model has not learned to answer, or ends its turn at once"
    ]
    page = render(gather(nodes, samples=1), title="t", revision="abc", libraries={})
    assert f'<p class="note">{found.notes[0]}</p>' in page
    assert '<td class="number">80 of 80</td>' in page
    assert "<pre>⏎\n⏎\n⏎\n⏎\n⏎\n⏎\n… and 10 more blank lines</pre>" in page


def test_lineage_curves_and_times(nodes: dict[str, Input]) -> None:
    content = gather(nodes, samples=2)
    assert content.edges == [("sft", "evaluation.sft"), ("sft", "evaluation.rl")]
    assert content.curves == {
        "sft": {"loss": [(0, 1.0), (1, 0.5), (2, 1 / 3)], "seconds/rollout": [(0, 0.5), (1, 0.5), (2, 0.5)]}
    }
    assert [(row.name, row.seconds, row.device_seconds) for row in content.stages] == [
        ("sft", 10.0, 20.0), ("evaluation.sft", 10.0, 20.0), ("evaluation.rl", 10.0, 20.0),
    ]  # fmt: skip


def test_the_page_stands_alone_and_escapes_what_models_and_data_say(nodes: dict[str, Input]) -> None:
    page = render(gather(nodes, samples=2), title="t", revision="abc", libraries={"torch": "1"})
    assert "<b>question" not in page
    assert "&lt;b&gt;question" in page
    assert page.count("<svg") == 3  # the curves, the phases, the lineage
    assert not any(outside in page for outside in ("<script", "src=", "@import", "url(http"))
    assert "+0.500" in page


def test_whole_numbers_have_no_fraction_and_others_three_digits(nodes: dict[str, Input]) -> None:
    content = gather(nodes, samples=2)
    page = " ".join(render(content, title="t", revision="abc", libraries={}).split())
    assert '<tr><td>pass@1</td> <td class="number">0.500 </td> <td class="number">1 </td> </tr>' in page
    assert '<tr><td>prompts</td> <td class="number">40 </td> <td class="number">40 </td> </tr>' in page
    assert [stage.metrics for stage in content.stages] == [
        "loss 0.250",
        "pass@1 0.500, prompts 40",
        "pass@1 1, prompts 40",
    ]


def test_the_same_artifacts_give_the_same_page(nodes: dict[str, Input]) -> None:
    pages = [render(gather(nodes, samples=2), title="t", revision="abc", libraries={}) for _ in range(2)]
    assert pages[0] == pages[1]


def test_validations_are_drawn_at_the_steps_that_they_were_made(nodes: dict[str, Input]) -> None:
    lines = [
        {"step": step, "validation/loss": 1.0 / step, "validation/far/loss": 2.0, "validation/best": 1.0 / step,
         "validation/best_step": step}
        for step in (5, 7)
    ]  # fmt: skip
    with (nodes["sft"].folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    content = gather(nodes, samples=2)
    assert content.curves["sft"]["validation/loss"] == [(5, 1 / 5), (7, 1 / 7)]
    page = render(content, title="t", revision="abc", libraries={})
    titles = [name for name in ("loss", "far/loss", "best", "best_step") if f">validation/{name}<" in page]
    assert titles == ["loss", "far/loss"]
