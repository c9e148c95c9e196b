"""Figures end in metrics.jsonl, whatever else is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from rlhf_core.config.recipe import TrackingConfig
from rlhf_core.tracking.tracker import Tracker


def _tracker(folder: Path, *, wandb: bool = False, tensorboard: bool = False) -> Tracker:
    settings = TrackingConfig(wandb=wandb, tensorboard=tensorboard)
    return Tracker(folder, settings, name="sft", run_id="run-1", key="a" * 64, config={"epochs": 1})


def test_lines_have_step_time_and_figures_and_are_there_at_once(tmp_path: Path) -> None:
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


def test_tensorboard_reads_the_same_figures(tmp_path: Path) -> None:
    with _tracker(tmp_path / "t", tensorboard=True) as tracker:
        tracker.log(1, {"loss": 0.5})
        tracker.log(2, {"loss": 0.25})
    (tmp_path / "artifact").mkdir()
    tracker.keep(tmp_path / "artifact")
    (file,) = (tmp_path / "artifact" / "tracking" / "tensorboard").iterdir()
    scalars = [
        (event.step, value.tag, float(make_ndarray(value.tensor)))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert scalars == [(1, "loss", 0.5), (2, "loss", 0.25)]


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
