"""What a stage's job is submitted with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.attempt import Attempt, AttemptOutcome
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.graph.graph import build_graph
from rlhf_core.pipeline.specs import RunSettings
from rlhf_core.recipe.loading import load_recipe
from tasks.stage import _memory, _request, _times_stuck
from tests.rlhf_core.artifacts.manifests import manifest

pytestmark = pytest.mark.system

RECIPE = """
name: r
data: {d: {format: prompts, source: {type: files, paths: [d.jsonl]}}}
base: {source: {type: scratch}}
rl:
  algorithm: grpo
  dataset: d
  steps: 1
  prompts_per_step: 1
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
  grpo:
    rewards: {judge: {type: http, url_variable: JUDGE_URL, header_variable: ALIGNMENT_HEADER_JUDGE}}
    optimizer: {learning_rate: 1e-3}
"""


def test_a_job_gets_the_variables_that_its_config_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUDGE_URL", "ALIGNMENT_HEADER_JUDGE", "ANOTHER", "HF_TEST"):
        monkeypatch.setenv(name, f"of {name}")
    (tmp_path / "d.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    graph = build_graph(load_recipe(str(tmp_path / "r.yaml")), {})
    settings = RunSettings("run", "store", tmp_path, {}, "recipe")
    environment = _request(graph["rl"], settings, 0).environment
    assert environment["JUDGE_URL"] == "of JUDGE_URL"
    assert environment["ALIGNMENT_HEADER_JUDGE"] == "of ALIGNMENT_HEADER_JUDGE"
    assert "ANOTHER" not in environment
    others = _request(graph["base"], settings, 0).environment
    assert others["HF_TEST"] == "of HF_TEST"
    assert "JUDGE_URL" not in others


def test_a_merge_reserves_a_processor_and_memory_for_the_model_and_a_driver_no_processor(tmp_path: Path) -> None:
    """Drivers that each held a part of a processor, and waited for workers, would together leave none to these."""
    text = RECIPE.replace("  rollout: {max_length: 64}", "  rollout: {max_length: 64}\n  lora: {rank: 2}")
    (tmp_path / "d.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    graph = build_graph(load_recipe(str(tmp_path / "r.yaml")), {})
    settings = RunSettings("run", "store", tmp_path, {}, "recipe")
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(1000))
    base, adapter = graph["merge.rl"].input_refs["model"], graph["merge.rl"].input_refs["adapter"]
    for ref in (base, adapter):
        repository.publish(
            manifest("stored").model_copy(update={"stage": ref.stage, "key": ref.key}), tmp_path / "model"
        )
    merge = _request(graph["merge.rl"], settings, _memory(graph["merge.rl"], repository))
    assert (merge.cpus, merge.memory) == (1.0, 8000)
    driver = _request(graph["rl"], settings, _memory(graph["rl"], repository))
    assert (driver.cpus, driver.memory) == (0.0, 0)


def test_jobs_that_hang_in_a_row_count_from_one_checkpoint(tmp_path: Path) -> None:
    store, ref = LocalStore(tmp_path), ArtifactRef(stage="sft", key="0" * 64)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    counts = []
    ends: list[tuple[AttemptOutcome, int | None]] = [
        ("stuck", None), ("killed", None), ("stuck", 10), ("stuck", 10), ("stuck", 20), ("stuck", 20), ("published", 20)
    ]  # fmt: skip
    for number, (outcome, resumed_after) in enumerate(ends):
        at = start + timedelta(minutes=number)
        Attempts(store, ref).write(
            Attempt(id=f"{number}", host="h", device="cpu", gpus=0, cores=1, started_at=at, seen_at=at,
                    outcome=outcome, resumed_after=resumed_after)
        )  # fmt: skip
        counts.append(_times_stuck(store, ref))
    assert counts == [1, 0, 1, 2, 1, 2, 0]
