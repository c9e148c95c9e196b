"""The report as its job makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES
from tests.rlhf_core.artifacts.manifests import manifest

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("own_folders")]


def test_it_reads_manifests_and_metrics_and_fetches_no_weights(local: ArtifactRepository, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (made / "model.safetensors").write_text("weights")
    policy = local.publish(manifest("policy"), made)
    stage, config, libraries = STAGES["report"], ReportConfig(title="Alignment run tiny"), computing_libraries()
    inputs = {"node.sft": policy.ref}
    key = stage_key(stage, config, inputs=inputs, user_files={}, seed=None, libraries=libraries)
    spec = StageSpec(
        name="report", stage=stage.name, stage_version=stage.version, key=key, config=config.model_dump(mode="json"),
        inputs=inputs, user_files={}, seed=None, libraries=libraries, tracking={"wandb": False, "tensorboard": False},
    )  # fmt: skip
    local.write_spec(spec)
    assert run_job(local.store.url, spec.ref).kind is Kind.REPORT
    cached = [path for path in (tmp_path / "cache" / "blobs").iterdir() if path.suffix != ".size"]
    assert [path.read_text() for path in cached] == [(made / "metrics.jsonl").read_text()]
    page = (local.fetch(spec.ref, tmp_path / "cache") / "report.html").read_text()
    assert "<title>Alignment run tiny</title>" in page
    assert "<h1>Alignment run tiny</h1>" in page
    assert "loss" in page
