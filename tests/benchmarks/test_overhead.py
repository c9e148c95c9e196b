"""The overhead of stages, from manifests and metrics whose times are made up."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.overhead import find_run, main, measure, measure_run, table
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.record import NodeRecord, Outcome, RunRecord, write_record

pytestmark = pytest.mark.endurance("benchmarks")

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEGAN = START.timestamp()
SFT = [  # 2 s of steps, then 3 s
    {"step": 10, "time": BEGAN + 22, "loss": 1.0, "tokens": 2000, "tokens_per_second": 1000.0},
    {"step": 20, "time": BEGAN + 25.5, "loss": 0.5, "tokens": 5000, "tokens_per_second": 1000.0},
]
RL = [
    {"step": 0, "time": BEGAN + 38, "seconds/rollout": 4.0, "seconds/score": 1.0, "seconds/reward": 0.5,
     "seconds/advantage": 0.0, "seconds/update": 2.0, "seconds/publish": 0.5},
    {"step": 1, "time": BEGAN + 44, "seconds/rollout": 3.0, "seconds/score": 1.0, "seconds/reward": 0.5,
     "seconds/advantage": 0.0, "seconds/update": 1.0, "seconds/publish": 0.5},
]  # fmt: skip


def manifest(name: str, seconds: float, stage: str = "sft", digit: str = "a") -> Manifest:
    return Manifest(
        kind=Kind.POLICY, name=name, stage=stage, key=digit * 64, files=(), parents={}, config={}, seed=0,
        code_revision="unknown", libraries={}, device_seconds=seconds, device="cpu",
        started_at=START, finished_at=START + timedelta(seconds=seconds),
    )  # fmt: skip


def test_supervised_steps_are_work_and_what_comes_before_is_start_up() -> None:
    found = measure(manifest("sft", 40.0), SFT)
    assert (found.job, found.work, found.start_up) == pytest.approx((40.0, 5.0, 20.0))
    assert found.share == pytest.approx(35 / 40)
    assert found.around is None


def test_steps_before_a_stage_was_killed_count_for_nothing() -> None:
    killed = {"step": 5, "time": BEGAN - 50, "loss": 2.0, "tokens": 1000, "tokens_per_second": 1000.0}
    lines = [killed, {**SFT[0], "tokens": 3000}, {**SFT[1], "tokens": 6000}]
    found = measure(manifest("sft", 40.0), lines)
    assert (found.job, found.work, found.start_up) == pytest.approx((40.0, 5.0, 20.0))


def test_of_an_rl_step_rollout_score_and_update_are_work() -> None:
    found = measure(manifest("rl", 48.0, "rl"), RL)
    assert found.work == pytest.approx(12.0)
    assert found.start_up == pytest.approx(30.0)
    assert found.share == pytest.approx(0.75)


def test_a_line_without_steps_counts_for_nothing() -> None:
    found = measure(manifest("reward_model", 40.0), [*SFT, {"step": 20, "time": BEGAN + 30, "held_out_accuracy": 0.9}])
    assert found.work == pytest.approx(5.0)


def test_an_evaluation_says_how_long_it_sampled() -> None:
    found = measure(manifest("evaluation.rl", 30.0), [{"step": 0, "time": BEGAN + 28, "sampling_seconds": 15.0}])
    assert (found.work, found.start_up, found.share) == pytest.approx((15.0, 13.0, 0.5))


def test_a_stage_without_steps_has_no_share() -> None:
    found = measure(manifest("data.text", 3.0), [{"step": 0, "time": BEGAN + 2, "rows": 10}])
    assert (found.job, found.work, found.start_up, found.share) == (3.0, None, None, None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def stored_run(store: Store, tmp_path: Path) -> RunRecord:
    """A run with a reused SFT, a computed RL and a failed evaluation, in the store."""
    repository = ArtifactRepository(store)
    nodes = []
    stages: list[tuple[Manifest, list[dict[str, Any]] | None, Outcome, float]] = [
        (manifest("sft", 40.0), SFT, "reused", 0.1),
        (manifest("rl", 48.0, "rl", "b"), RL, "computed", 55.0),
        (manifest("evaluation.rl", 1.0, "evaluation", "c"), None, "failed", 1.0),
    ]
    for made, lines, outcome, seconds in stages:
        if lines is not None:
            folder = tmp_path / made.name
            folder.mkdir()
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            repository.publish(made, folder)
        nodes.append(NodeRecord(name=made.name, ref=made.ref, outcome=outcome, seconds=seconds))
    record = RunRecord(
        run_id="new", recipe={"name": "made-up"}, overrides=(), started_at=START,
        finished_at=START + timedelta(minutes=2), nodes=tuple(nodes),
    )  # fmt: skip
    write_record(store, record)
    return record


def test_a_run_is_read_from_the_store(store: Store, tmp_path: Path) -> None:
    record = stored_run(store, tmp_path)
    sft, rl = measure_run(ArtifactRepository(store), record)
    assert (sft.name, sft.work, sft.around) == ("sft", pytest.approx(5.0), None)
    assert (rl.name, rl.work, rl.around) == ("rl", pytest.approx(12.0), pytest.approx(7.0))
    shown = StringIO()
    Console(width=180, file=shown).print(table(record, [sft, rl]))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert "sft 40.0 s 5.0 s 20.0 s 15.0 s 88% – – < 12 s" in lines
    assert "rl 48.0 s 12.0 s 30.0 s 6.0 s 75% 7.0 s 37.0 s < 15 s" in lines
    assert "all jobs 88.0 s 17.0 s 81%" in lines
    assert "the run 120.0 s – –" in lines


def test_a_small_stage_is_waited_for_whole_and_the_demo_too(store: Store, tmp_path: Path) -> None:
    made = manifest("data.text", 2.0, "dataset")
    node = NodeRecord(name="data.text", ref=made.ref, outcome="computed", seconds=3.5)
    found = measure(made, [], node)
    assert (found.waited, found.aim) == (pytest.approx(3.5), 3.0)
    record = stored_run(store, tmp_path).model_copy(update={"recipe": {"name": "tiny"}, "nodes": (node,)})
    shown = StringIO()
    Console(width=180, file=shown).print(table(record, [found]))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert "data.text 2.0 s – – – – 1.5 s 3.5 s < 3 s" in lines
    assert "the run 120.0 s 120.0 s < 150 s" in lines


def test_the_newest_run_is_taken_unless_one_is_named(store: Store, tmp_path: Path) -> None:
    record = stored_run(store, tmp_path)
    write_record(store, record.model_copy(update={"run_id": "old", "finished_at": START}))
    assert find_run(store, None).run_id == "new"
    assert find_run(store, "old").run_id == "old"
    with pytest.raises(StoreError, match="has no run other"):
        find_run(store, "other")


def test_a_store_without_runs_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    assert main([]) == 1
    assert "has no run yet: `alignment run tiny` makes one" in capsys.readouterr().err
