"""A rubric's judge is compared with people in a job of its own, and the plan of what trains by it has the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import prepare
from tests.rlhf_core.chat_endpoint import chat_endpoint, words_met
from tests.rlhf_core.recipes import both, file, put, write

pytestmark = pytest.mark.parts

# Four rows on which judge and people agree, and one on which the judge is stricter.
LABELLED = [
    {"prompt": f"{number}?", "completion": completion, "verdicts": {"right": met}}
    for number, (completion, met) in enumerate(
        [("four", True), ("four!", True), ("five", False), ("six", False), ("4", True)]
    )
]


def test_the_plan_has_the_figures_of_the_job(tmp_path: Path, local_store_url: str) -> None:
    with chat_endpoint() as endpoint:
        endpoint.reply = words_met
        judge = {"type": "rubric", "url": endpoint.url, "model": "wise", "path": "rubric.yaml"}

        def calibrated(recipe: dict[str, Any], root: Path) -> None:
            source = {"type": "files", "paths": ["labelled.jsonl"]}
            recipe["data"]["labelled"] = {"format": "prompts", "source": source}
            rl, evaluation = recipe.pop("rl"), recipe.pop("evaluation")
            recipe["calibration"] = {"dataset": "labelled", "reward": judge}
            recipe["rl"], recipe["evaluation"] = rl, evaluation

        recipe = write(tmp_path, both(
            file("rubric.yaml", "criteria:\n- {name: right, description: has four}\n"),
            file("labelled.jsonl", "".join(json.dumps(row) + "\n" for row in LABELLED)),
            put("rl", "ppo", "rewards", value={"quality": {**judge, "calibration": "calibration"}}),
            calibrated,
        ))  # fmt: skip
        prepared = prepare(recipe, [], store=local_store_url)
        place = "rl.ppo.rewards.quality: the judge wise"
        assert f"{place} is calibrated by `calibration` first" in prepared.notes
        tried = try_node(prepared, prepared.node("calibration"), print)
        assert len(endpoint.requests) == 5
        notes = prepare(recipe, [], store=local_store_url).notes
    metrics = tried.manifest.metrics
    assert (metrics["agreement"], metrics["kappa"]) == (0.8, pytest.approx((0.8 - 0.48) / 0.52))
    (note,) = (note for note in notes if note.startswith(place))
    assert note.startswith(f"{place} agrees with people with a kappa of 0.62 (")
    assert note.endswith(", on 80% of 5 verdicts of 5 rows")
