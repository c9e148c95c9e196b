"""Metrics are written to metrics.jsonl, with or without other trackers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import wandb
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from rlhf_core.config.tracking import TrackingConfig
from rlhf_core.system.stopping import STOPS, Stop
from rlhf_core.tracking.tracker import Tracker


def _tracker(folder: Path, *, wandb: bool = False, tensorboard: bool = False) -> Tracker:
    settings = TrackingConfig(wandb=wandb, tensorboard=tensorboard)
    return Tracker(folder, settings, name="sft", run_id="run-1", key="a" * 64, config={"epochs": 1})


def test_lines_have_step_time_and_metrics_and_are_written_at_once(tmp_path: Path) -> None:
    with _tracker(tmp_path) as tracker:
        tracker.log(1, {"loss": 0.5, "tokens": 7})
        line = json.loads((tmp_path / "metrics.jsonl").read_text())
        assert line.pop("time") > 1.7e9
        assert line == {"step": 1, "loss": 0.5, "tokens": 7.0}


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with _tracker(tmp_path) as tracker:
        tracker.log(1, {"loss": float("nan"), "kl": float("inf")})
    assert '"loss": null, "kl": null' in (tmp_path / "metrics.jsonl").read_text()


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    with _tracker(tmp_path) as tracker, pytest.raises(TypeError, match="the metric `loss` is 'low'"):
        tracker.log(1, {"loss": "low"})  # type: ignore[dict-item]


def test_the_file_is_there_when_nothing_was_logged(tmp_path: Path) -> None:
    tracker = _tracker(tmp_path / "t", wandb=True, tensorboard=True)
    tracker.close()
    (tmp_path / "artifact").mkdir()
    tracker.keep(tmp_path / "artifact")
    assert [file.name for file in (tmp_path / "artifact").rglob("*")] == ["metrics.jsonl"]
    with pytest.raises(FileExistsError):
        tracker.keep(tmp_path / "artifact")


def test_tensorboard_reads_the_same_metrics(tmp_path: Path) -> None:
    with _tracker(tmp_path / "t", tensorboard=True) as tracker:
        tracker.log(1, {"loss": 0.5})
        tracker.log(2, {"loss": 0.25})
    (tmp_path / "artifact").mkdir()
    tracker.keep(tmp_path / "artifact")
    logged = [(step, tag, value) for step, _, tag, value in scalars(tmp_path / "artifact")]
    assert logged == [(1, "loss", 0.5), (2, "loss", 0.25)]


def scalars(folder: Path) -> list[tuple[int, float, str, float]]:
    (file,) = (folder / "tracking" / "tensorboard").iterdir()
    return [
        (event.step, event.wall_time, value.tag, float(make_ndarray(value.tensor)))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]


def test_a_restored_run_has_the_killed_ones_lines_once(tmp_path: Path) -> None:
    killed = _tracker(tmp_path / "killed", tensorboard=True)
    killed.log(1, {"loss": 0.5, "kl": float("nan")})
    kept = killed.logged()
    killed.log(2, {"loss": 0.25})  # after the checkpoint: computed again
    with _tracker(tmp_path / "t", tensorboard=True) as tracker:
        tracker.restore(kept)
        tracker.log(2, {"loss": 0.25})
        assert tracker.logged().startswith(kept)
        with pytest.raises(RuntimeError, match="before the first"):
            tracker.restore(kept)
    (tmp_path / "artifact").mkdir()
    tracker.keep(tmp_path / "artifact")
    lines = [json.loads(line) for line in (tmp_path / "artifact" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (2, 0.25)]
    logged = scalars(tmp_path / "artifact")
    assert [(step, tag) for step, _, tag, _ in logged] == [(1, "loss"), (1, "kl"), (2, "loss")]
    assert logged[0][1] == lines[0]["time"]
    assert logged[1][3] != logged[1][3]  # NaN


@pytest.mark.parts
def test_the_stop_of_a_job_ends_wandb_and_not_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends its signal to all processes of a job, and the stage has its step and a checkpoint to finish."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = psutil.Process().children(recursive=True)
    tracker = _tracker(tmp_path, wandb=True)
    tracker.log(1, {"loss": 0.5})
    ended = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in ended:
        process.kill()
    psutil.wait_procs(ended, timeout=10)
    try:
        with pytest.raises(ConnectionError):  # a few are taken by the connection's buffer
            [tracker.log(step, {"loss": 0.25}) for step in range(2, 50)]
        monkeypatch.setattr(STOPS, "requested", Stop("the job was stopped"))
        tracker.log(50, {"loss": 0.125})
        assert json.loads(tracker.logged().splitlines()[-1])["loss"] == 0.125
        tracker.close()
    finally:
        with suppress(ConnectionError):
            wandb.teardown()


@pytest.mark.parts
def test_wandb_without_a_key_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with _tracker(tmp_path / "t", wandb=True) as tracker:
        tracker.log(1, {"loss": 0.5})
    (tmp_path / "artifact").mkdir()
    tracker.keep(tmp_path / "artifact")
    (file,) = (tmp_path / "artifact" / "tracking" / "wandb").rglob("*.wandb")
    assert b"loss" in file.read_bytes()


@pytest.mark.parts
def test_wandb_has_the_teams_names_a_table_and_one_run_for_what_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = TrackingConfig(
        tensorboard=False, wandb_entity="team-e", wandb_group="group-g", wandb_name="name-n", wandb_tags=("tag-t",),
        wandb_samples=1,
    )  # fmt: skip
    completion = {"text": "four-completion", "scores": {"exact": 1.0}, "tokens": 1, "finish_reason": "stop"}
    samples = [{"id": n, "prompt": f"prompt-{n}", "answer": "4", "completions": [completion]} for n in range(2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))

    def of(name: str) -> Tracker:
        return Tracker(tmp_path / name, settings, name="sft", run_id="run-1", key="a" * 64, config={"epochs": 1})

    first = of("first")
    first.log(1, {"loss": 0.5})
    kept = first.logged()
    first.close()
    with of("resumed") as resumed:
        resumed.restore(kept)
        resumed.log_samples(tmp_path / "samples.jsonl")
        resumed.log_samples(tmp_path / "none.jsonl")
    (run,) = (tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb")
    (same,) = (tmp_path / "resumed" / "wandb").glob("offline-run-*/*.wandb")
    assert same.name == run.name  # with the run's id, by which a resumed online run is found
    content = run.read_bytes()
    assert all(word in content for word in (b"team-e", b"group-g", b"name-n/sft", b"tag-t", b"a" * 12))
    (table,) = (tmp_path / "resumed" / "wandb").rglob("*.table.json")
    row = [0, "prompt-0", "4", "four-completion", "{'exact': 1.0}", "stop"]
    assert json.loads(table.read_text())["data"] == [row]


@pytest.mark.parts
@pytest.mark.parametrize("wanted", [False, True])
def test_wandb_measures_the_machine_if_it_is_asked_to(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    init, given = wandb.init, []
    monkeypatch.setattr(wandb, "init", lambda **start: given.append(start["settings"]) or init(**start))
    settings = TrackingConfig(tensorboard=False, wandb_system_metrics=wanted)
    with Tracker(tmp_path, settings, name="sft", run_id="", key="a" * 64, config={}) as tracker:
        tracker.log(1, {"loss": 0.5})
    (of_job,) = given
    assert of_job.x_disable_stats is not wanted


def test_settings_of_wandb_have_its_limits() -> None:
    for setting, value in (("wandb_name", "n" * 129), ("wandb_entity", "a/b"), ("wandb_tags", ["t" * 65])):
        with pytest.raises(ValueError, match="up to"):
            TrackingConfig.model_validate_json(json.dumps({setting: value}))
