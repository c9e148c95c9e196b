"""The verdict of a gate, against a bootstrap of its own, and evaluations that are not comparable."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.stages import gate
from tests.rlhf_core.stages.context import LocalContext, local_input

Scores = dict[str, list[float]]  # by scorer, one per prompt


def evaluation(folder: Path, scores: Scores, config: dict[str, Any] | None = None, **row: Any) -> Input:
    folder.mkdir(parents=True)
    rows = [
        {"id": str(i), "completions": [{"scores": dict(zip(scores, values, strict=True))}], **row}
        for i, values in enumerate(zip(*scores.values(), strict=True))
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    item = local_input(folder, Kind.EVALUATION)
    return Input(item.manifest.model_copy(update={"config": config or {}}), folder)


def judged(folder: Path, settings: dict[str, Any], baseline: Input, candidate: Input) -> Output:
    config = ModelGateConfig.model_validate_json(json.dumps({"candidate": "new", "baseline": "old", **settings}))
    inputs = {
        f"{group}.{name}.evaluation.{model}": item
        for group in ("better", "not_worse")
        for name in settings.get(group, {})
        for model, item in (("baseline", baseline), ("candidate", candidate))
    }
    return gate.run(config, inputs, LocalContext(folder / "work", name="gate"))


def verdict(folder: Path, settings: dict[str, Any], before: Scores, after: Scores) -> Output:
    return judged(folder, settings, evaluation(folder / "before", before), evaluation(folder / "after", after))


def interval(before: list[float], after: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean difference: each resample draws how often each difference occurs."""
    values, counts = np.unique(np.subtract(after, before), return_counts=True)
    drawn = np.random.default_rng(1).multinomial(len(before), counts / len(before), size=20_000)
    low, high = np.percentile(drawn @ values / len(before), [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
def test_the_verdict_is_that_of_a_bootstrap_over_prompts(tmp_path: Path, seed: int) -> None:
    rng, prompts = random.Random(seed), 400
    gains = {"exact": rng.uniform(0.05, 0.4), "style": rng.choice([-1, 1]) * rng.uniform(0.05, 0.3)}
    before = {name: [float(rng.random() < 0.5) for _ in range(prompts)] for name in gains}
    after = {
        name: [
            max(old, float(rng.random() < gain)) if gain > 0 else old * (rng.random() > -gain) for old in before[name]
        ]
        for name, gain in gains.items()
    }
    by, than = 0.05, 0.1
    output = verdict(tmp_path, {"better": {"exact": {"by": by}}, "not_worse": {"style": {"than": than}}}, before, after)
    expected = {name: interval(before[name], after[name]) for name in gains}
    for name, (low, high) in expected.items():
        assert output.metrics[f"{name}_low"] == pytest.approx(low, abs=0.006)  # 2,000 resamples
        assert output.metrics[f"{name}_high"] == pytest.approx(high, abs=0.006)
        assert output.metrics[name] == pytest.approx((sum(after[name]) - sum(before[name])) / prompts)
    distances = [expected["exact"][0] - by, expected["style"][0] + than]
    assert min(map(abs, distances)) > 0.006, "the verdict hangs on the resamples: take another seed"
    assert output.metrics["accepted"] == int(all(distance > 0 for distance in distances))


HALF, ALL = [1.0, 0.0] * 50, [1.0] * 100


@pytest.mark.parametrize(
    ("settings", "exact", "style", "accepted"),
    [
        ({"better": {"exact": {}}}, ALL, HALF, 1),
        ({"better": {"exact": {}}}, HALF, ALL, 0),
        ({"better": {"exact": {}}, "not_worse": {"style": {"than": 0.04}}}, ALL, HALF, 1),
        ({"better": {"exact": {}}, "not_worse": {"style": {"than": 0.03}}}, ALL, HALF, 0),  # 3.7 points, on others
        ({"better": {"exact": {}}, "not_worse": {"style": {"than": 0.04}}}, ALL, [0.0] * 100, 0),
        ({"not_worse": {"accepted": {"scorer": "style", "than": 0.04}}}, ALL, [0.0] * 100, 0),
    ],
)
def test_every_metric_must_pass(
    tmp_path: Path, settings: dict[str, Any], exact: list[float], style: list[float], accepted: int
) -> None:
    output = verdict(tmp_path, settings, {"exact": HALF, "style": HALF}, {"exact": exact, "style": style})
    assert (output.kind, output.metrics["accepted"]) == (Kind.GATE, accepted)


def test_the_verdict_has_each_comparison_and_the_reasons(tmp_path: Path) -> None:
    settings = {"better": {"exact": {}}, "not_worse": {"form": {"scorer": "style", "than": 0.04}}}
    output = verdict(tmp_path, settings, {"exact": HALF, "style": HALF}, {"exact": HALF, "style": HALF})
    content = json.loads((output.folder / "verdict.json").read_text())
    assert content["accepted"] is False
    assert content["reason"] == output.metrics["reason"]
    assert [(each["metric"], each["scorer"], each["passed"], each["reason"]) for each in content["comparisons"]] == [
        ("exact", "exact", False,
         "exact, greedy: +0.000 (-0.037 to +0.037) on 100 prompts; the lower end is not above +0.000"),
        ("form", "style", True,
         "style, greedy: +0.000 (-0.037 to +0.037) on 100 prompts; the lower end is at least -0.040"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "another question"}, "the two evaluations have different prompts"),
        ({"answer": "5"}, "the two evaluations have different prompts"),
        ({"config": {"scorers": {"exact": {"kind": "numeric"}}}}, r"have different scorers \(exact\)"),
        ({"config": {"sampling": {"max_tokens": 2}}}, "have different sampling"),
        ({"scores": {"exact": HALF[:3]}}, "the two evaluations have different prompts"),
        ({"scores": {"other": HALF}}, "the evaluation has no scorer `exact`; it has other"),
    ],
)
def test_evaluations_that_are_not_comparable_are_no_verdict(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    baseline = evaluation(tmp_path / "before", {"exact": HALF}, prompt="a question", answer="4")
    candidate = evaluation(
        tmp_path / "after", **{"scores": {"exact": HALF}, "prompt": "a question", "answer": "4", **change}
    )
    with pytest.raises(StageError, match=rf"^gate\.better\.exact: .*{message}"):
        judged(tmp_path, {"better": {"exact": {}}}, baseline, candidate)


def test_evaluations_of_other_judges_are_no_verdict(tmp_path: Path) -> None:
    items = [evaluation(tmp_path / name, {"exact": HALF}) for name in ("before", "after")]
    judges = [{"scorers.exact.model": ArtifactRef(stage="reward_model", key=digit * 64)} for digit in "12"]
    baseline, candidate = (
        Input(item.manifest.model_copy(update={"parents": parents}), item.folder)
        for item, parents in zip(items, judges, strict=True)
    )
    with pytest.raises(StageError, match="have different models that judge"):
        judged(tmp_path, {"better": {"exact": {}}}, baseline, candidate)
