"""Logs the metrics of a stage: always to metrics.jsonl, optionally to Weights & Biases and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import IO, Any, Protocol, Self

from rlhf_core.config.tracking import TRACKERS, TrackingConfig
from rlhf_core.errors import reason_of
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.protocol import METRICS_FILE, TRACKING_FOLDER

OTHERS = "others"  # the folder of trackers of plugins, one in it for each


class Sink(Protocol):
    """A destination of metrics. One of a plugin is made by `of(config, folder, about)`, with an empty folder."""

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes `<folder>/metrics.jsonl` and the files of the other trackers, all of which become part of the artifact.

    settings: the trackers to use; name: the recipe's node; run_id: the stage's run; config: the stage's settings, which
    the trackers show. They are started with the first metrics, since many stages log none.
    """

    def __init__(
        self, folder: Path, settings: TrackingConfig, *, name: str, run_id: str, key: str, config: Mapping[str, Any]
    ):
        self.folder = folder
        self._settings = settings
        self._about = About(name=name, run_id=run_id, key=key, config=config)
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / METRICS_FILE).open("w", encoding="utf-8")
        self._sinks: list[Sink] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line: the step, the time in UNIX seconds, and the metrics.

        A value that is not finite becomes null, since JSON has no NaN. Raises TypeError that names a metric which is
        not a number.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        now = time.time()
        self._file.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        self._send(step, now, values)

    def _send(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        if self._sinks is None:
            self._sinks = list(self._start_sinks())
        for sink in self._sinks:
            with _until_a_stop(sink):
                sink.log(step, unix_time, metrics)

    def logged(self) -> bytes:
        """Return the lines written so far."""
        return (self.folder / METRICS_FILE).read_bytes()

    def restore(self, lines: bytes) -> None:
        """Start with the `lines` of a killed job.

        They are written to the file unchanged, and logged again to the other trackers, whose files were lost with the
        job. Raises RuntimeError if something has been logged already.
        """
        if self.logged():
            raise RuntimeError("lines can be restored only before the first is logged")
        self._file.write(lines.decode())
        self._file.flush()
        for line in lines.splitlines():
            values = json.loads(line)
            step, unix_time = values.pop("step"), values.pop("time")
            self._send(step, unix_time, {name: math.nan if value is None else value for name, value in values.items()})

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks or []:
            with _until_a_stop(sink):
                sink.close()
        self._sinks = []

    def keep(self, folder: Path) -> None:
        """Copy the files to the artifact's `folder`, after `close`: metrics.jsonl, and those of the other trackers
        below `tracking/`. Raises FileExistsError if the stage wrote a metrics.jsonl itself.
        """
        if (folder / METRICS_FILE).exists():
            raise FileExistsError(f"{folder / METRICS_FILE}: this name is reserved for the metrics that a stage logs")
        shutil.copyfile(self.folder / METRICS_FILE, folder / METRICS_FILE)
        for pattern in ("tensorboard/events.*", "wandb/offline-run-*/*.wandb", f"{OTHERS}/**/*"):
            for file in filter(Path.is_file, self.folder.glob(pattern)):
                copy = folder / TRACKING_FOLDER / file.relative_to(self.folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)

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
        for name, config in self._settings.others.items():
            (folder := self.folder / OTHERS / name).mkdir(parents=True)
            sinks.append(resolve_name(TRACKERS[config.type].implementation).of(config, folder, self._about))
        return sinks


@dataclass(frozen=True, slots=True)
class About:
    """The stage whose metrics a tracker gets."""

    name: str  # the recipe's node
    run_id: str
    key: str
    config: Mapping[str, Any]


@contextmanager
def _until_a_stop(sink: Sink) -> Iterator[None]:
    """Drop errors of `sink` once the job is to stop: the signal ended the sink's own processes too, and must not cost
    the checkpoint. A job that resumes logs all lines again.
    """
    try:
        yield
    except Exception as error:
        if STOPS.requested is None:
            raise
        print(f"{type(sink).__name__} has ended with the stop of the job: {reason_of(error)}", flush=True)


class TensorBoard:
    """Event files, written by TensorBoard's own writer: that of torch would load torch into every job."""

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
    """Online if there is a key, else offline: `wandb sync` uploads the artifact's folder `wandb` later."""

    def __init__(self, folder: Path, project: str, about: About):
        import wandb

        # An explicit WANDB_MODE takes precedence. Without it, a job must not wait for someone to enter a key.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        settings = wandb.Settings(
            mode=mode,  # type: ignore[arg-type]  # wandb rejects a wrong WANDB_MODE
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
            # An unreachable tracker must not end the training.
            print(f"Weights & Biases cannot be reached, this run is logged offline: {error}", flush=True)
            self._run = wandb.init(**start, settings=settings.model_copy(update={"mode": "offline"}))
        # The metrics of one step may arrive in several calls, and a later call may be about an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before the file is complete


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metric `{name}` is {value!r}, not a number") from error
