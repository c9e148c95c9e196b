"""A stop of this job before its end, by a signal or since its node is taken away.

A training loop that can stop between two steps says so by `Stops.between_steps`: it is given some seconds to end its
step and write a checkpoint. All other work is interrupted at once, and so is the loop by a second signal; a stage that
trains nothing stores the rows that it has then (stages/partial_rows.py).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from rlhf_core.errors import StoppedError
from rlhf_core.system.variables import value_of


@dataclass(frozen=True, slots=True)
class Stop:
    """reason: the beginning of a sentence; error: what the job ends with, by which others decide what follows."""

    reason: str
    error: type[StoppedError] = StoppedError


class Stops:
    """The stops of this process: `requested` is the first one, which a loop looks at after each step."""

    def __init__(self) -> None:
        self.between_steps = False
        self.superseded = False  # another process computes the same: nothing more is to be stored
        self.requested: Stop | None = None
        self._deadline: threading.Timer | None = None

    def request(self, stop: Stop, seconds: float) -> None:
        """Request a stop after the current step; interrupt the job once `seconds` have passed. Only the first counts.

        Also called in handlers of signals, so it takes no lock.
        """
        if self.requested is None:
            self.requested = stop
            self._deadline = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
            self._deadline.daemon = True
            self._deadline.start()

    def clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.__init__()  # type: ignore[misc]  # as at the start of the process


STOPS = Stops()


def grace_seconds() -> float:
    """Return the seconds that a stopped job has for its step and a checkpoint. Raises VariableError."""
    return float(value_of("ALIGNMENT_STOP_SECONDS") or 5)
