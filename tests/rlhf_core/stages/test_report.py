"""The report as its job makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.logged_rollouts import LoggedStep, encode_step, rollouts_file
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.stages.made_reports import reported

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("own_folders")]


def test_it_fetches_metrics_and_two_logged_steps_and_no_weights(local: ArtifactRepository, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (made / "model.safetensors").write_text("weights")
    (made / "tracking" / "rollouts").mkdir(parents=True)
    steps = {number: encode_step(LoggedStep(step=number, prompts=4, completions=8, histograms={}, groups=()))
             for number in (1, 5, 9)}  # fmt: skip
    for number, data in steps.items():
        (made / "tracking" / "rollouts" / rollouts_file(number)).write_bytes(data)
    policy = local.publish(manifest("policy"), made)
    report = reported(local, {"sft": policy.ref}, "Alignment run tiny")
    assert report.kind is Kind.REPORT
    cached = [path for path in (tmp_path / "cache" / "blobs").iterdir() if path.suffix != ".size"]
    expected = {(made / "metrics.jsonl").read_bytes(), steps[1], steps[9]}
    assert {path.read_bytes() for path in cached} == expected
    folder = local.fetch(report.ref, tmp_path / "cache")
    page = (folder / "report.html").read_text()
    assert ('id="stage-sft/steps/1"' in page, 'id="stage-sft/steps/9"' in page) == (True, True)
    assert json.loads((folder / "report.json").read_text())["curves"] == {"sft": {"loss": [[1, 2.0], [2, 1.0]]}}
    assert "<title>Alignment run tiny</title>" in page
    assert "<h1>Alignment run tiny</h1>" in page
    assert "loss" in page
