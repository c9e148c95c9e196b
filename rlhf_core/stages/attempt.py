"""The record of this job's attempt at its artifact, kept in the store from its first moment on."""

from __future__ import annotations

import signal
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from rlhf_core.actors import forwarding
from rlhf_core.artifacts.attempt import Attempt, AttemptOutcome, JudgeUse, Peak
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.leases import Holder
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.errors import PreemptedError, StoppedError, StoreError, StuckError, one_line, shortened
from rlhf_core.stages.full_disk import explained
from rlhf_core.system.metering import METER, MachineEnergy, peak_device_bytes, peak_host_bytes, reset_peak
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.progress import ProgressReporter

_LONGEST_REASON = 1000  # characters
_OUTCOMES: dict[type[BaseException], AttemptOutcome] = {PreemptedError: "preempted", StuckError: "stuck"}


class RecordedAttempt:
    """Stores the attempt on entry, with each `beat`, and on exit with the outcome, by the exception that ends it.

    Ends the attempts of jobs that have died, since this job holds the lease.
    """

    def __init__(
        self,
        attempts: Attempts,
        holder: Holder,
        started_at: datetime,
        *,
        run_id: str,
        reserved: Reservation,
        device: str,
        memory: int,
    ) -> None:
        METER.clear()
        reset_peak()
        self._attempts = attempts
        self._attempt = Attempt(
            id=holder.id, run_id=run_id, host=holder.host, device=device, gpus=reserved.gpus, cores=reserved.cpus,
            memory=memory, started_at=started_at, seen_at=started_at,
        )  # fmt: skip
        self._earlier: list[Attempt] = []
        self._machine = MachineEnergy()
        self._checkpoints: Checkpoints | None = None
        self._progress: ProgressReporter | None = None
        self._kept_other = False
        self._lock = threading.Lock()  # the heartbeat must not write after the end

    def follow(self, checkpoints: Checkpoints, progress: ProgressReporter) -> None:
        """Record the steps of a stage that has them."""
        self._checkpoints, self._progress = checkpoints, progress

    def beat(self) -> None:
        with self._lock:
            if self._attempt.outcome == "running":
                self._attempt = self._now()
                self._attempts.write(self._attempt)

    def published(self) -> list[Attempt]:
        """Return all attempts as the manifest has them: with this one, which ends with it."""
        return [*self._earlier, self._now("published")]

    def stuck(self, reason: str) -> None:
        """Store the end of this attempt, whose job may not be able to any more."""
        with self._lock:
            self._attempt = self._now("stuck", _shown(reason))
            self._attempts.write(self._attempt)

    @property
    def times_stuck(self) -> int:
        """The number of earlier attempts that were stuck."""
        return sum(each.outcome == "stuck" for each in self._earlier)

    def ended_second(self) -> None:
        """Note that the store had a result of this key, and keeps it."""
        self._kept_other = True

    def __enter__(self) -> Self:
        self._earlier = self._attempts.close_dead(self._attempt.id)
        self._attempts.write(self._attempt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome, reason = _end(error)
        if error is None and self._kept_other:
            reason = "the store had a result already, and keeps it"
        with self._lock:
            self._attempt = self._now(outcome, reason)
            try:
                self._attempts.write(self._attempt)
            except StoreError as problem:
                # Not raised: it must neither hide another error nor fail a job that has succeeded.
                print(f"the end of this attempt could not be stored, and counts as killed: {problem}", flush=True)

    def _now(self, outcome: AttemptOutcome = "running", reason: str = "") -> Attempt:
        judges, processes = METER.snapshot()
        update: dict[str, Any] = {
            "seen_at": datetime.now(UTC),
            "outcome": outcome,
            "reason": reason,
            "waited": METER.waited,
            "judges": {
                model: JudgeUse(
                    calls=use.calls, unreported=use.unreported,
                    prompt_tokens=use.prompt_tokens, completion_tokens=use.completion_tokens,
                )
                for model, use in judges.items()
            },
            "peaks": (
                Peak(process="job", host=peak_host_bytes(), device=peak_device_bytes()),
                *(Peak(process=name, host=use.host_bytes, device=use.device_bytes) for name, use in processes),
            ),
            "energy": self._energy(),
        }  # fmt: skip
        if self._checkpoints is not None and self._progress is not None:
            committed = tuple(self._checkpoints.committed)
            steps = [step for step in (self._progress.step, *committed[-1:]) if step is not None]
            update |= {
                "resumed_after": self._checkpoints.resumed_after,
                "step": max(steps, default=None),
                "checkpoints": committed,
            }
        return self._attempt.model_copy(update=update)

    def _energy(self) -> dict[str, float]:
        """Return joules. A GPU that two processes shared counts once."""
        by_gpu: dict[str, float] = {}
        for _, use in METER.snapshot()[1]:
            for gpu, joules in use.joules.items():
                by_gpu[gpu] = max(joules, by_gpu.get(gpu, 0.0))
        energy = {"gpu": sum(by_gpu.values())} if by_gpu else {}
        machine = self._machine.joules()
        return energy if machine is None else energy | {"cpu": machine}


def _end(error: BaseException | None) -> tuple[AttemptOutcome, str]:
    """Return outcome and reason of an attempt that ends with `error`, as the job's exit status tells them."""
    if error is None:
        return "published", ""
    is_signal = isinstance(error, SystemExit) and error.code == signal.SIGTERM  # raised by Ray's handler
    stop = STOPS.requested
    if isinstance(error, KeyboardInterrupt | StoppedError) or is_signal or stop is not None:
        kind = type(error) if isinstance(error, StoppedError) else StoppedError if stop is None else stop.error
        if isinstance(error, StoppedError):
            reason = str(error)
        else:
            reason = stop.reason if kind is StuckError and stop else "the job was stopped before it had finished"
        return _OUTCOMES.get(kind, "stopped"), _shown(reason)
    return "failed", _shown(str(explained(error)) or type(error).__name__)


def _shown(reason: str) -> str:
    return shortened(one_line(forwarding.redacted(" ".join(reason.split()))), _LONGEST_REASON)
