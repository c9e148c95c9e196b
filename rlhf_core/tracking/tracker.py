"""Logs the metrics of a stage: always to metrics.jsonl, optionally to other trackers."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import IO, Any, Self

from rlhf_core.config.tracking import TRACKERS, TrackingConfig
from rlhf_core.errors import reason_of
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.protocol import METRICS_FILE, TRACKING_FOLDER
from rlhf_core.tracking.sink import About, Sink
from rlhf_core.tracking.tensorboard import TensorBoard
from rlhf_core.tracking.weights_and_biases import WeightsAndBiases

OTHERS = "others"  # the folder of trackers of plugins, one in it for each


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
        self._name, self._run_id, self._key, self._config = name, run_id, key, config
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / METRICS_FILE).open("w", encoding="utf-8")
        self._sinks: list[Sink] | None = None
        self._wandb: WeightsAndBiases | None = None

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
            self._sinks = self._start_sinks(self._about(unix_time))
        for sink in self._sinks:
            with _until_a_stop(sink):
                sink.log(step, unix_time, metrics)

    def log_samples(self, file: Path) -> None:
        """Show the first lines of an evaluation's samples in a table of Weights & Biases, if the settings ask for it.

        file: may be missing.
        """
        if self._wandb is None or not self._settings.wandb_samples or not file.is_file():
            return
        with file.open(encoding="utf-8") as lines, _until_a_stop(self._wandb):
            self._wandb.log_samples([json.loads(line) for line in islice(lines, self._settings.wandb_samples)])

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

    def _about(self, first_line: float) -> About:
        """first_line: its time, which a job that resumes takes over."""
        computation = hashlib.sha256(f"{self._key} {first_line}".encode()).hexdigest()[:32]
        return About(self._name, self._run_id, self._key, self._config, computation)

    def _start_sinks(self, about: About) -> list[Sink]:
        sinks: list[Sink] = []
        if self._settings.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard"))
        if self._settings.wandb:
            sinks.append(self._start_wandb(about))
        for name, config in self._settings.others.items():
            (folder := self.folder / OTHERS / name).mkdir(parents=True)
            sinks.append(resolve_name(TRACKERS[config.type].implementation).of(config, folder, about))
        return sinks

    def _start_wandb(self, about: About) -> WeightsAndBiases:
        self._wandb = WeightsAndBiases(self.folder, self._settings, about)
        return self._wandb


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


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metric `{name}` is {value!r}, not a number") from error
