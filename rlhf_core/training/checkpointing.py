"""The driver's side of checkpoints: when one is due, writing one at a time, and resuming from the newest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from rlhf_core.artifacts.checkpoints import Checkpoint, CheckpointFile, Checkpoints
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.contract import StageContext
from rlhf_core.errors import IntegrityError, StageError
from rlhf_core.system.stopping import STOPS, Stop
from rlhf_core.system.watchdog import WATCHDOG
from rlhf_core.tracking.protocol import METRICS_FILE
from rlhf_core.training.background import Background
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.snapshots import SHARED, SnapshotWorker, shared_file

DRIVER = "driver.json"


class DriverState(Protocol):
    """State in the driver that the next step depends on, as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpointing:
    """Write the checkpoints of a run and resume from them. `step` is the number of completed steps."""

    def __init__(
        self,
        config: CheckpointConfig,
        context: StageContext,
        workers: WorkerGroup[SnapshotWorker],
        driver: Mapping[str, DriverState],
        others: Mapping[str, WorkerGroup[SnapshotWorker]] = MappingProxyType({}),
    ) -> None:
        """others: further groups of ranks with state of their own, by the name of their SnapshotWorkers."""
        self._config = config
        self._context = context
        self._workers = workers
        self._groups = {"": workers, **others}
        self._driver = driver
        self._writing: Background[None] | None = None
        self._last_step = 0
        self._last_time = time.monotonic()

    def resume(self, total: int) -> int:
        """Restore workers, driver and logged metrics from the newest intact checkpoint.

        Returns its step, or 0 if there is none. total: steps of the whole run. A damaged checkpoint is reported and
        skipped. From now on a stop of the job waits for `after`.
        Raises StageError if the checkpoint does not fit this run.
        """
        done = self._resume(total)
        STOPS.between_steps = self._config.every_steps is not None or self._config.every_minutes is not None
        return done

    def _resume(self, total: int) -> int:
        if not self._config.resume:
            self._context.checkpoints.clear()
            return 0
        for candidate in self._context.checkpoints.newest():
            damage = str(candidate) if isinstance(candidate, IntegrityError) else self._restore(candidate)
            if not damage:
                assert isinstance(candidate, Checkpoint)
                self._context.checkpoints.resumed_after = candidate.step
                self._context.progress(candidate.step, total, f"resumes after step {candidate.step}")
                self._last_step, self._last_time = candidate.step, time.monotonic()
                return candidate.step
            print(f"a checkpoint cannot be used, trying an older one: {damage}", flush=True)
        return 0

    def _restore(self, checkpoint: Checkpoint) -> str:
        """Restore `checkpoint`; returns an empty string, or its damage if it was not restored."""
        try:
            driver = json.loads(self._context.checkpoints.read(checkpoint, DRIVER))
            metrics = self._context.checkpoints.read(checkpoint, METRICS_FILE)
        except IntegrityError as error:
            return str(error)
        self._require_same_groups(checkpoint)
        groups = self._groups.values()
        damage = [report for each in groups for report in each.call(SnapshotWorker.fetch_state, checkpoint) if report]
        if damage:
            return "; ".join(damage)
        for group in groups:
            group.call(SnapshotWorker.restore_state)
        for part, state in driver.items():
            self._driver[part].load_state_dict(state)
        self._context.restore_log(metrics)
        replicas = checkpoint.replicas or checkpoint.ranks
        if (checkpoint.ranks, replicas) != (self._workers.size, self._workers.replicas):
            print(
                f"the checkpoint is of {checkpoint.ranks} workers with {replicas} replicas of the model, and this run "
                f"has {self._workers.size} with {self._workers.replicas}: weights, optimizer state and the order of "
                "the data continue, and the next steps are equal to rounding",
                flush=True,
            )
        return ""

    def _require_same_groups(self, checkpoint: Checkpoint) -> None:
        """Raise StageError if another model was on workers of its own."""
        files = {entry.path for entry in checkpoint.files}
        missing = next((name for name in self._groups if shared_file(name) not in files), None)
        known = {shared_file(name) for name in self._groups}
        other = next((file for file in sorted(files - known) if file.endswith(f".{SHARED}")), None)
        if missing is not None or other is not None:
            name, had = (missing, "the policy's") if other is None else (other.removesuffix(f".{SHARED}"), "its own")
            raise StageError(
                f"the newest checkpoint, of step {checkpoint.step}, has the {name} on {had} workers: set its placement "
                "as it was, or checkpoint.resume to false to start from scratch"
            )

    def steps_left(self, step: int) -> int:
        """Return the number of steps until `every_steps` makes the next checkpoint due."""
        if self._config.every_steps is None:
            return 1 << 62
        return max(1, self._last_step + self._config.every_steps - step)

    def after(self, step: int) -> None:
        """Start a checkpoint of the state after `step`, if one is due and the previous one has been written.

        If the job is to stop, write one in any case, and raise StoppedError. Raises the error of writing the previous
        one.
        """
        if STOPS.requested is not None and STOPS.between_steps:
            self._stop(step, STOPS.requested)
        if self._writing is not None:
            if self._writing.running:
                return
            self._wait()
        minutes = (time.monotonic() - self._last_time) / 60
        due = self._config.every_steps is not None and step - self._last_step >= self._config.every_steps
        if due or (self._config.every_minutes is not None and minutes >= self._config.every_minutes):
            self._save(step)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and raise its error. The loop has ended."""
        STOPS.between_steps = False
        self._wait()

    def _stop(self, step: int, stop: Stop) -> NoReturn:
        self._wait()
        if self._last_step != step:
            self._save(step)
            self._wait()
        raise stop.error(f"{stop.reason}; it resumes after step {step}, whose checkpoint is stored")

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(self, step: int) -> None:
        self._last_step, self._last_time = step, time.monotonic()
        for group in self._groups.values():
            group.call(SnapshotWorker.copy_state)
        driver = {part: state.state_dict() for part, state in self._driver.items()}
        files = {DRIVER: json.dumps(driver).encode(), METRICS_FILE: self._context.logged()}
        name = Checkpoints.new_name(step)
        written = [group.aside(SnapshotWorker.write_state, name) for group in self._groups.values()]
        # Read now: a failing stage shuts its workers down, possibly before the commit.
        ranks, replicas = self._workers.size, self._workers.replicas
        commit = partial(self._commit, name, step, ranks, replicas, files, written)
        self._writing = Background(commit, name=f"checkpoint {step}")

    def _commit(
        self,
        name: str,
        step: int,
        ranks: int,
        replicas: int,
        files: dict[str, bytes],
        written: Sequence[Callable[[], list[list[CheckpointFile]]]],
    ) -> None:
        checkpoints = self._context.checkpoints
        with WATCHDOG.phase("checkpoint"):
            entries = [checkpoints.add(name, file, content) for file, content in files.items()]
            entries += [entry for of_group in written for rank in of_group() for entry in rank]
            checkpoints.commit(
                Checkpoint(
                    name=name, step=step, ranks=ranks, replicas=replicas, files=tuple(entries),
                    libraries=dict(self._context.libraries), created_at=datetime.now(UTC),
                )
            )  # fmt: skip
            checkpoints.prune(name, self._config.keep)
