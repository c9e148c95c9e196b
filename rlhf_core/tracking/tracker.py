"""Where the figures of a stage go: metrics.jsonl always, Weights & Biases and TensorBoard beside it."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from rlhf_core.config.tracking import TrackingConfig

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One place that figures go to."""

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes `<folder>/metrics.jsonl`, and beside it what the other trackers keep: all becomes part of the artifact.

    settings: which trackers; name: the recipe's node; run_id: the run that the stage belongs to; config: the stage's
    settings, shown beside the figures. The others start with the first figures, since many stages have none.
    """

    def __init__(
        self, folder: Path, settings: TrackingConfig, *, name: str, run_id: str, key: str, config: Mapping[str, Any]
    ):
        self.folder = folder
        self._settings = settings
        self._about = _About(name=name, run_id=run_id, key=key, config=config)
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / METRICS_FILE).open("w", encoding="utf-8")
        self._sinks: list[Sink] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: step, time in UNIX seconds, and the figures; null where one is not finite, since JSON has no NaN.

        Raises TypeError, naming it, for a figure that is not a number.
        """
        figures = {name: _number(name, value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        now = time.time()
        self._file.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        self._tell_sinks(step, now, figures)

    def _tell_sinks(self, step: int, unix_time: float, figures: Mapping[str, float]) -> None:
        if self._sinks is None:
            self._sinks = list(self._start_sinks())
        for sink in self._sinks:
            sink.log(step, unix_time, figures)

    def logged(self) -> bytes:
        """The lines so far."""
        return (self.folder / METRICS_FILE).read_bytes()

    def restore(self, lines: bytes) -> None:
        """Begin with the `lines` of a run that was killed: as they were in the file, told anew to the other trackers,
        whose own files were lost with it. Raises RuntimeError if something was logged before.
        """
        if self.logged():
            raise RuntimeError("lines can be restored only before the first is logged")
        self._file.write(lines.decode())
        self._file.flush()
        for line in lines.splitlines():
            figures = json.loads(line)
            step, unix_time = figures.pop("step"), figures.pop("time")
            told = {name: math.nan if value is None else value for name, value in figures.items()}
            self._tell_sinks(step, unix_time, told)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks or []:
            sink.close()
        self._sinks = []

    def keep(self, folder: Path) -> None:
        """Copy, after `close`, what was written into the artifact's `folder`: metrics.jsonl, and the trackers' own
        files below `tracking/`. Raises FileExistsError if the stage wrote a metrics.jsonl itself.
        """
        if (folder / METRICS_FILE).exists():
            raise FileExistsError(f"{folder / METRICS_FILE}: this name is kept for the figures that a stage logs")
        shutil.copyfile(self.folder / METRICS_FILE, folder / METRICS_FILE)
        for pattern in ("tensorboard/events.*", "wandb/offline-run-*/*.wandb"):
            for file in self.folder.glob(pattern):
                kept = folder / "tracking" / file.relative_to(self.folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        if self._settings.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard"))
        if self._settings.wandb:
            sinks.append(WeightsAndBiases(self.folder, self._settings.wandb_project, self._about))
        return sinks


class _About:
    def __init__(self, *, name: str, run_id: str, key: str, config: Mapping[str, Any]):
        self.name, self.run_id, self.key, self.config = name, run_id, key, config


class TensorBoard:
    """Event files, written with TensorBoard's own writer: torch's would load torch into every job."""

    def __init__(self, folder: Path):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=unix_time, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Online with a key, else offline: `wandb sync` uploads the folder `wandb` of the artifact later."""

    def __init__(self, folder: Path, project: str, about: _About):
        import wandb

        # An explicit WANDB_MODE counts; without it, a job must not stop to ask for a key.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        settings = wandb.Settings(
            mode=mode,  # type: ignore[arg-type]  # a wrong WANDB_MODE is wandb's to refuse
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        start: dict[str, Any] = {
            "project": project, "name": about.name, "group": about.run_id or None, "config": dict(about.config),
            "tags": [about.key[:12]], "dir": os.environ.get("WANDB_DIR", str(folder)),
        }  # fmt: skip
        try:
            self._run = wandb.init(**start, settings=settings)
        except wandb.errors.Error as error:
            # A tracker that cannot be reached is no reason to lose the training.
            print(f"Weights & Biases cannot be reached, this run is kept offline: {error}", flush=True)
            self._run = wandb.init(**start, settings=settings.model_copy(update={"mode": "offline"}))
        # Figures of one step may come in several calls, and a later call may be about an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before the file is whole


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metric `{name}` is {value!r}, not a number") from error
