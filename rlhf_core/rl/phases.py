"""Durations of the phases of a step, each watched for a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core.system.watchdog import WATCHDOG


class PhaseTimer:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with WATCHDOG.phase(phase):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as metrics."""
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics
