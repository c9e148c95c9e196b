"""Rubrics before a run: their criteria, and whose judge was compared with people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.preflight.calibrations import calibration_notes
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.key import computing_libraries
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.recipes import Change, Problems, both, file, put, write

pytestmark = pytest.mark.parts

JUDGE = {"type": "rubric", "url": "http://127.0.0.1:9/v1", "model": "wise", "path": "rubric.yaml"}
FILE = file("rubric.yaml", "criteria:\n- {name: right, description: It is right.}\n")
LABELLED = {"prompt": "2+2?", "completion": "four", "verdicts": {"right": True}}


def rewarded(**settings: Any) -> Change:
    return both(FILE, put("rl", "ppo", "rewards", value={"quality": {**JUDGE, **settings}}))


def calibrated(row: dict[str, Any] | None = None, **settings: Any) -> Change:
    """A recipe with a calibration above its stage `rl`."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["labelled"] = {"format": "prompts", "source": {"type": "files", "paths": ["labelled.jsonl"]}}
        rl, evaluation = recipe.pop("rl"), recipe.pop("evaluation")
        recipe["calibration"] = {"dataset": "labelled", "reward": {**JUDGE, **settings}}
        recipe["rl"], recipe["evaluation"] = rl, evaluation

    return both(file("labelled.jsonl", json.dumps({**LABELLED, **(row or {})}) + "\n"), change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (rewarded(), ""),
        (
            both(rewarded(), file("rubric.yaml", "criteria: []")),
            "rl.ppo.rewards.quality.path: rubric.yaml: criteria must",
        ),
        (
            rewarded(path="other.yaml"),
            "rl.ppo.rewards.quality.path: other.yaml: this file cannot be read (No such file",
        ),
        (
            both(rewarded(), file("rubric.yaml", "criteria: [{description: x, weight: -1}]")),
            "rl.ppo.rewards.quality.path: rubric.yaml: no criterion has a weight above 0",
        ),
        (
            rewarded(path=None, column="criteria"),
            "rl.ppo.rewards.quality: `rubric` needs the column `criteria`, which `data.prompts` lacks at prompts.jsonl",
        ),
        (
            both(
                rewarded(path=None, column="criteria"),
                file(
                    "prompts.jsonl", json.dumps({"prompt": "2+2?", "answer": "4", "criteria": [{"points": 5}]}) + "\n"
                ),
            ),
            "`criteria`, criterion 1: `description`: Field required",
        ),
        (both(rewarded(calibration="calibration"), calibrated()), ""),
        (
            both(rewarded(calibration="calibration"), calibrated(model="other")),
            "rl.ppo.rewards.quality.calibration: `calibration` compares another judge with people, with a different mo",
        ),
        (
            both(rewarded(), calibrated({"verdicts": {"left": True}})),
            "calibration.dataset: labelled.jsonl line 1: `verdicts.left` is not a criterion",
        ),
        (
            both(rewarded(), calibrated({"verdicts": None})),
            "calibration.dataset: labelled.jsonl line 1: the column `verd",
        ),
    ],
)
def test_a_rubric_is_read_before_a_job(problems: Problems, change: Change, expected: str) -> None:
    said = problems(change)
    if not expected:
        assert said == []
    else:
        (problem,) = said
        assert expected in problem


def graph(tmp_path: Path, change: Change) -> dict[str, Node]:
    return build_graph(load_recipe(write(tmp_path, change)), computing_libraries())


def test_the_plan_says_that_a_judge_is_not_calibrated(tmp_path: Path) -> None:
    assert calibration_notes(graph(tmp_path, rewarded()), None) == [
        "rl.ppo.rewards.quality: the judge wise is not calibrated: compare it with people's verdicts by a stage "
        "`calibration`, and name that here"
    ]


def test_the_plan_has_the_agreement_of_a_calibrated_judge(tmp_path: Path) -> None:
    nodes = graph(tmp_path, both(rewarded(calibration="calibration"), calibrated()))
    assert nodes["rl"].inputs["ppo.rewards.quality.calibration"] == "calibration"
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    place = "rl.ppo.rewards.quality: the judge wise"
    assert calibration_notes(nodes, repository) == [f"{place} is calibrated by `calibration` first"]
    made = tmp_path / "made"
    made.mkdir()
    (made / "calibration.json").write_text("{}")
    metrics = {"agreement": 0.7, "kappa": 0.4, "kappa_low": 0.15, "kappa_high": 0.65, "verdicts": 50, "rows": 40}
    ref = nodes["calibration"].ref
    found = manifest("calibration", metrics=metrics).model_copy(update={"stage": ref.stage, "key": ref.key})
    repository.publish(found, made)
    assert calibration_notes(nodes, repository) == [
        f"{place} agrees with people with a kappa of 0.40 (0.15 to 0.65), on 70% of 50 verdicts of 40 rows"
    ]
