"""Deadlines of a job's phases, learned from earlier phases of the same name: what takes far longer has hung.

    with WATCHDOG.phase("publish"):
        …

The first phases of each name have no deadline of their own: what they take is what is learned. So a name stands for
work of one size, or `units` says how much of it there is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LEARNED_FROM = 3  # phases of a name


@dataclass(slots=True)
class _Learned:
    phases: int = 0
    longest: float = 0.0  # seconds a unit


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    units: int
    began: float


class Watchdog:
    """The phases of this process, in whatever thread."""

    def __init__(self, tick: float = 2.0) -> None:
        """tick: seconds between two looks."""
        self._tick = tick
        self._suspended = 0.0  # seconds
        self._learned: dict[str, _Learned] = {}
        self._phases: list[_Phase] = []
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, units: int = 1) -> Iterator[None]:
        """Measure a phase, which may be within another. One that raises an error teaches nothing."""
        phase = _Phase(name, units, self._now())
        with self._lock:
            self._phases.append(phase)
        try:
            yield
            with self._lock:
                learned = self._learned.setdefault(name, _Learned())
                learned.phases += 1
                learned.longest = max(learned.longest, (self._now() - phase.began) / units)
        finally:
            with self._lock:
                self._phases = [each for each in self._phases if each is not phase]

    @contextmanager
    def watching(self, factor: float, least: float, hung: Callable[[str], None]) -> Iterator[None]:
        """Call `hung` once, in a thread of its own, with a sentence on a phase past its deadline.

        factor: of the longest earlier phase of the same name, which is the deadline; least: seconds, at least.
        Forgets what other jobs of this process took.
        """
        self._suspended, self._learned = 0.0, {}
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(factor, least, hung, ended), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, factor: float, least: float, hung: Callable[[str], None], ended: threading.Event) -> None:
        before = time.monotonic()
        while not ended.wait(self._tick):
            now = time.monotonic()
            self._suspended += max(0.0, now - before - 2 * self._tick)  # a stopped process has not hung
            before = now
            if reason := self._overdue(factor, least):
                hung(reason)
                return

    def _overdue(self, factor: float, least: float) -> str:
        """Return a sentence on the innermost phase past its deadline; empty if there is none."""
        with self._lock:
            for phase in reversed(self._phases):
                learned = self._learned.get(phase.name, _Learned())
                longest, seconds = learned.longest * phase.units, self._now() - phase.began
                if learned.phases >= _LEARNED_FROM and seconds > max(least, factor * longest):
                    return (
                        f"`{phase.name}` has hung: it takes {seconds:.0f} s, and the longest of {learned.phases} "
                        f"before it took {longest:.1f} s"
                    )
        return ""

    def _now(self) -> float:
        return time.monotonic() - self._suspended


WATCHDOG = Watchdog()
