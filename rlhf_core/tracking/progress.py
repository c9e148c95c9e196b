"""Progress of a stage as lines of its log, for whoever follows the job: `@progress {"step": 3, "total": 10, …}`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping

PREFIX = "@progress "
_MOST_OFTEN_SECONDS = 0.5
_WINDOW = 20  # reports whose pace is taken for the pace of what is left


class Progress:
    """Prints what it is told, at most twice a second, and says from the newest pace how long it will still take."""

    def __init__(self, write: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic):
        self._write = write or (lambda line: print(line, flush=True))
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._of: tuple[str, int] | None = None
        self._written_at = float("-inf")

    def report(self, step: int, total: int, phase: str = "", figures: Mapping[str, float] | None = None) -> None:
        """step of total are done; total 0: nobody knows of how many. A new phase, total or a lower step starts anew."""
        now = self._clock()
        new = self._of != (phase, total) or (self._recent and step < self._recent[-1][1])
        if new:
            self._of = (phase, total)
            self._recent.clear()
        if not self._recent or step > self._recent[-1][1]:
            self._recent.append((now, step))
        if not new and step != total and now - self._written_at < _MOST_OFTEN_SECONDS:
            return
        self._written_at = now
        line = {
            "step": step,
            "total": total,
            "phase": phase,
            "figures": {name: float(value) for name, value in (figures or {}).items()},
            "seconds_left": self._seconds_left(now, step, total),
        }
        self._write(PREFIX + json.dumps(line))

    def _seconds_left(self, now: float, step: int, total: int) -> float | None:
        if total > 0 and step >= total:
            return 0.0
        (began, first), (reached, last) = self._recent[0], self._recent[-1]
        if total <= 0 or last == first:
            return None
        pace = (reached - began) / (last - first)
        return round(max(0.0, (total - step) * pace - (now - reached)), 1)
