"""Progress of a stage as lines of its output (see protocol.py), with an estimate of the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from rlhf_core.tracking.protocol import Progress, encode

_MIN_SECONDS_BETWEEN_LINES = 0.5
_WINDOW = 20  # the pace is measured over this many of the newest reports


class ProgressReporter:
    """Prints at most two lines a second and estimates the time left from the newest pace."""

    def __init__(self, write: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic):
        self._write = write or (lambda line: print(line, flush=True))
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._phase_and_total: tuple[str, int] | None = None
        self._written_at = float("-inf")
        self.step: int | None = None  # the newest of a known number of steps

    def report(self, step: int, total: int, phase: str = "", metrics: Mapping[str, float] | None = None) -> None:
        """Report `step` of `total` steps as done; a `total` of 0 means that the number of steps is unknown.

        A new phase, a new total or a lower step restarts the estimate and is printed at once.
        """
        now = self._clock()
        self.step = step if total > 0 else self.step
        restarted = self._phase_and_total != (phase, total) or (self._recent and step < self._recent[-1][1])
        if restarted:
            self._phase_and_total = (phase, total)
            self._recent.clear()
        if not self._recent or step > self._recent[-1][1]:
            self._recent.append((now, step))
        if not restarted and step != total and now - self._written_at < _MIN_SECONDS_BETWEEN_LINES:
            return
        self._written_at = now
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._write(encode(Progress(step, total, phase, values, self._seconds_left(now, step, total))))

    def _seconds_left(self, now: float, step: int, total: int) -> float | None:
        if total > 0 and step >= total:
            return 0.0
        (first_time, first_step), (last_time, last_step) = self._recent[0], self._recent[-1]
        if total <= 0 or last_step == first_step:
            return None
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        return round(max(0.0, (total - step) * seconds_per_step - (now - last_time)), 1)
