"""The content of the report from artifacts on disk, and its page: what it says, what it escapes, its size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import stage_cost
from rlhf_core.artifacts.logged_rollouts import LoggedCompletion, LoggedGroup, LoggedSequence, LoggedStep
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.config.prices import PricesConfig
from rlhf_core.contract import Input
from rlhf_core.report.content import Content, gather
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.page import MOST_BYTES, render, with_run
from rlhf_core.report.run_part import RunPart

START = datetime(2026, 1, 1, tzinfo=UTC)
PRICES = PricesConfig.model_validate_json('{"currency": "EUR", "core": 0.036}')
ATTEMPT = Attempt(
    id="a", run_id="other", host="node", device="cpu", gpus=0.0, cores=1.0, started_at=START,
    seen_at=START + timedelta(seconds=400), outcome="published", reason="why " * 1000,
)  # fmt: skip


HOSTILE = "</script><script>alert(1)</script><!-- the run -->\"'"


def page_of(
    content: Content, nodes: Mapping[str, Input], rollouts: Mapping[str, list[LoggedStep]] | None = None
) -> str:
    """The page, without the part about a run."""
    views = [NodeView(name, item.manifest.ref, "done", item.manifest) for name, item in nodes.items()]
    return render(content, views, rollouts or {}, title="t", revision="abc", libraries={"torch": "1"})


def body_of(page: str) -> str:
    """The text of a page without its scripts, in single spaces."""
    return " ".join(page.partition("<main>")[2].partition("</main>")[0].split())


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
    assert (difference.before, difference.after, difference.value, difference.prompts) == ("sft", "rl", 0.5, 40)
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
    assert found.result.value == -0.25


def test_a_gate_s_verdict_is_said_first(nodes: dict[str, Input], tmp_path: Path) -> None:
    models = {"candidate": ("rl", "c"), "baseline": ("sft", "b")}
    gate = artifact(tmp_path / "gate", Kind.GATE, "d", models, {"accepted": 0, "reason": "no"})
    comparison = {
        "metric": "<b>style</b>", "completions": "greedy", "value": -0.5, "low": -0.6, "high": -0.4, "prompts": 40,
        "passed": False, "reason": "the lower end is below -0.010", "bound": -0.01,
    }  # fmt: skip
    verdict = {"accepted": False, "reason": "no", "comparisons": [comparison]}
    (gate.folder / "verdict.json").write_text(json.dumps(verdict))
    old = artifact(tmp_path / "old", Kind.ROUND, "e", {"candidate": ("rl", "c"), "accepted": ("sft", "b")}, {})
    (old.folder / "verdict.json").write_text(json.dumps({"accepted": True, "reason": "of an earlier <release>"}))
    nodes |= {"gate": gate, "round": old}
    page = page_of(gather(nodes, samples=2), nodes)
    sentence = body_of(page).partition("on 40 prompts: ")[2].partition("</p>")[0]
    assert sentence == (
        'better; <b class="failed">refused</b> by gate: no; <b class="succeeded">accepted</b> by round: of an earlier '
        "&lt;release&gt;."
    )
    first, second, rest = page.split("<h2>", 3)[1:]
    assert first.startswith("gate: refused</h2>")
    assert "rl/cccccccccccc, compared with sft/bbbbbbbbbbbb" in first
    assert "&lt;b&gt;style&lt;/b&gt;" in first
    assert "-0.600 to -0.400" in first
    assert '<line class="range" x1="-95.0" x2="-63.3"/><circle cx="-79.2" r="3.5"/>' in first
    assert '<line class="bound" x1="-1.6" x2="-1.6" y1="-8" y2="8">' in first
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
    assert [(d.before, d.after, d.value) for d in (*near.differences, *more.differences)] == [
        ("sft", "rl", 0.5), ("rl", "sft", -1.0),
    ]  # fmt: skip
    assert [list(row.completions) for row in (*near.samples, *more.samples)] == [["sft", "rl"]] * 2 + [
        ["rl", "sft"]
    ] * 2
    page = page_of(content, nodes)
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
    page = page_of(gather(nodes, samples=1), nodes)
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


def test_samples_are_sorted_by_the_largest_change_and_regressions_come_first(tmp_path: Path) -> None:
    nodes = {
        "evaluation.sft": evaluation(tmp_path / "a", "b", "policy", [1.0] * 3 + [0.0] * 4 + [0.5] * 3),
        "evaluation.rl": evaluation(tmp_path / "b", "c", "policy", [0.0, 0.5, 1.0] + [1.0] * 4 + [0.5] * 3),
    }
    (all_of,) = gather(nodes, samples=10).sets
    assert [sample.change for sample in all_of.samples] == [-1.0, -0.5, *[1.0] * 4, *[0.0] * 4]
    assert (all_of.worse, all_of.better) == (2, 4)
    (few,) = gather(nodes, samples=3).sets
    assert [sample.change for sample in few.samples] == [-1.0, -0.5, 1.0]  # many regressions hide no improvement
    page = body_of(page_of(gather(nodes, samples=3), nodes))
    assert "2 of 10 prompts have a lower score, 4 a higher one." in page
    assert page.count('<tr class="bad"><td><pre>') == 2


def test_the_page_names_the_model_and_how_to_load_it(nodes: dict[str, Input], tmp_path: Path) -> None:
    page = body_of(page_of(gather(nodes, samples=2), nodes))
    assert 'The model is <b>policy/aaaaaaaaaaaa</b>, of the stage <a href="#stage-sft">sft</a>.' in page
    assert "<code>alignment chat policy/aaaaaaaaaaaa</code>" in page
    assert '<section id="stage-sft">' in page
    nodes["reward_model"] = artifact(tmp_path / "rm", Kind.REWARD_MODEL, "f", {}, {})
    assert gather(nodes, samples=2).model == gather({"sft": nodes["sft"]}, samples=2).model
    only = gather({"reward_model": nodes["reward_model"]}, samples=2)
    assert only.model is not None
    assert only.model.is_reward_model
    assert gather({"evaluation.rl": nodes["evaluation.rl"]}, samples=2).model is None


def logged_step(text: str, tokens: int = 3) -> LoggedStep:
    """Five prompts with six completions each."""
    count = tokens - 1
    sequence = LoggedSequence(
        texts=(text,) * tokens, token_ids=(1,) * tokens, trained=(False, *[True] * count),
        engine_logprobs=(-1.23456789,) * count, trainer_logprobs=(-1.0,) * count, advantages=(0.5,) * count,
    )  # fmt: skip
    completion = LoggedCompletion(
        text=text, finish_reason=text, turns=1, reward=1.0, rewards={text: 1.0}, versions=((count, 1),),
        sequences=(sequence,), messages=({"role": text, "content": text},),
    )  # fmt: skip
    group = LoggedGroup(
        id="a", prompt=({"role": text, "content": text},), answer=text, completions=(completion,) * 6
    )  # fmt: skip
    return LoggedStep(step=7, prompts=5, completions=30, histograms={}, groups=(group,) * 5)


def test_a_step_is_a_sample_of_prompts_and_completions_with_their_tokens(nodes: dict[str, Input]) -> None:
    page = body_of(page_of(gather(nodes, samples=2), nodes, {"sft": [logged_step("four", tokens=1000)]}))
    assert page.count('<section class="group">') == 3
    assert page.count('<div class="completion">') == 12
    assert "4 of 6 completions" in page
    assert '<section id="stage-sft/steps/7">' in page
    assert '<a class="chip" href="#stage-sft/steps/7">step 7</a>' in page
    tokens = re.search(r"data-tokens='([^']*)'", page)
    assert tokens is not None
    columns = json.loads(tokens[1])
    assert (columns["engine"][:2], columns["id"][:2], len(columns["text"])) == ([None, -1.235], [1, 1], 400)
    assert "600 more tokens are left out." in page


def test_hostile_text_is_never_markup_nor_script(nodes: dict[str, Input]) -> None:
    rows = [
        {"id": str(i), "prompt": HOSTILE, "answer": HOSTILE,
         "completions": [{"text": HOSTILE, "scores": {HOSTILE: 1.0}}]}
        for i in range(3)
    ]  # fmt: skip
    for name in ("evaluation.sft", "evaluation.rl"):
        (nodes[name].folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (nodes["sft"].folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, HOSTILE: 1.0, f"seconds/{HOSTILE}": 2.0}) + "\n")
    hostile = {HOSTILE if name == "sft" else name: item for name, item in nodes.items()}
    page = page_of(gather(hostile, samples=2), hostile, {HOSTILE: [logged_step(HOSTILE)]})
    whole = with_run(page, part_of(hostile, overrides=[HOSTILE]))
    for each in (page, whole):
        assert "<script>alert" not in each
        assert each.count("<script>") == each.count("</script>") == 3  # Bokeh, and the two of ours
    assert page.count("<!-- the run -->") == 1
    assert "run made" in whole


def part_of(nodes: Mapping[str, Input], overrides: Sequence[str] = ()) -> RunPart:
    views = [NodeView(name, item.manifest.ref, "computed", item.manifest) for name, item in nodes.items()]
    costs = [stage_cost(name, "reused", [ATTEMPT] * 100, "made", PRICES) for name in nodes]
    return RunPart(
        "made", "succeeded", START, START + timedelta(minutes=5), True, overrides, "before",
        [("rl.steps", 1, 2)], views, {}, costs, PRICES, {}, {},
    )  # fmt: skip


def test_the_part_about_a_run_has_its_time_its_cost_and_what_differs_from_the_run_before(
    nodes: dict[str, Input],
) -> None:
    page, part = page_of(gather(nodes, samples=2), nodes), part_of(nodes, overrides=["rl.steps=2"])
    whole = body_of(with_run(page, part))
    assert 'run made <span class="succeeded">succeeded</span>, started 2026-01-01 00:00 UTC, 5:00; rl.steps=2' in whole
    assert "results of other runs saved 33.3 device hours, 1.20 EUR" in whole
    assert "<td>sft</td><td>reused, saved</td>" in whole
    assert "<td>rl.steps</td><td>1</td><td>2</td>" in whole
    assert whole.count('<div class="timeline">') == 1
    assert whole.count('<svg class="lineage"') == 1
    free = body_of(with_run(page, replace(part, prices=None, changes=[], is_finished=False)))
    assert "No prices are set" in free
    assert "Settings that differ from the run before before it</h2>" in free
    assert "None: the run before of this recipe had the same." in free
    with pytest.raises(ValueError, match="is not a report"):
        with_run("<html></html>", part)


def test_the_page_stands_alone_and_its_policy_lets_it_load_nothing(nodes: dict[str, Input]) -> None:
    page = page_of(gather(nodes, samples=2), nodes)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert policy[1].count("sha256-") == 3
    assert "unsafe-eval" not in policy[1]
    assert not any(outside in page.partition("<script>")[0] for outside in ("src=", "@import", "url("))
    assert '<svg class="lineage"' in page
    assert "+0.500" in page


def test_a_run_of_any_size_is_a_page_below_3_mb_that_says_what_it_left_out(tmp_path: Path) -> None:
    words = "a long text " * 2000
    nodes: dict[str, Input] = {}
    for number in range(150):
        item = artifact(tmp_path / str(number), Kind.POLICY, "a", {}, {"reason": words, "loss": 1.0})
        changes = {"key": f"{number:064d}", "config": {"prompt": words}}
        nodes[f"stage{number}"] = Input(item.manifest.model_copy(update=changes), item.folder)
        if number < 20:
            lines = [
                json.dumps({"step": step, **{f"group{n}/x": step * 0.1 + n for n in range(20)}}) for step in range(600)
            ]
            (item.folder / "metrics.jsonl").write_text("\n".join(lines))
    for model in range(12):
        item = evaluation(tmp_path / f"model{model}", "b", "policy", [0.0])
        rows = [
            {"id": str(i), "prompt": words, "answer": words,
             "completions": [{"text": words, "scores": {f"scorer{n}": float(model % 2) for n in range(4)}}]}
            for i in range(100)
        ]  # fmt: skip
        (item.folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        nodes[f"evaluation.model{model}"] = item
    logged = [logged_step(words, tokens=2000)]
    page = page_of(gather(nodes, samples=100), nodes, {f"stage{number}": logged for number in range(20)})
    whole = with_run(page, part_of(nodes, overrides=[words]))
    assert 1_800_000 < len(whole.encode()) < MOST_BYTES
    left_out = re.search(r"Left out, so that this page stays small: ([^.]*)\.", whole)
    assert left_out is not None
    assert all(what in left_out[1] for what in ("stages", "characters of long texts", "points of curves"))


def test_whole_numbers_have_no_fraction_and_others_three_digits(nodes: dict[str, Input]) -> None:
    content = gather(nodes, samples=2)
    page = body_of(page_of(content, nodes))
    assert '<tr><td>pass@1</td><td class="number">0.500</td><td class="number">1</td></tr>' in page
    assert '<tr><td>prompts</td><td class="number">40</td><td class="number">40</td></tr>' in page
    assert [stage.metrics for stage in content.stages] == [
        "loss 0.250",
        "pass@1 0.500, prompts 40",
        "pass@1 1, prompts 40",
    ]


def test_the_same_artifacts_give_the_same_page(nodes: dict[str, Input]) -> None:
    pages = [page_of(gather(nodes, samples=2), nodes) for _ in range(2)]
    assert pages[0] == pages[1]


def test_validations_are_drawn_at_the_steps_that_they_were_made(nodes: dict[str, Input]) -> None:
    lines = [
        {"step": step, "validation/loss": 1.0 / step, "validation/far/loss": 2.0 / step, "validation/best": 1.0 / step,
         "validation/best_step": step}
        for step in (5, 7)
    ]  # fmt: skip
    with (nodes["sft"].folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    content = gather(nodes, samples=2)
    assert content.curves["sft"]["validation/loss"] == [(5, 1 / 5), (7, 1 / 7)]
    charts = re.search(r"data-charts='([^']*)'", page_of(content, nodes))
    assert charts is not None
    drawn = {chart["title"]: chart["lines"] for chart in json.loads(charts[1])["charts"]}
    assert [(line["name"], line["x"]) for line in drawn["validation"]] == [
        ("validation/far/loss", [6, 8]), ("validation/loss", [6, 8]),
    ]  # fmt: skip
