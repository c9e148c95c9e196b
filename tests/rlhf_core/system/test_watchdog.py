"""Deadlines that are learned from earlier phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlhf_core.system.watchdog import Watchdog

TICK = 0.02
LEAST = 0.2


class Hung:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.said = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


@contextmanager
def watching(factor: float = 2.0, least: float = LEAST) -> Iterator[tuple[Watchdog, Hung]]:
    watchdog, hung = Watchdog(TICK), Hung()
    with watchdog.watching(factor, least, hung):
        yield watchdog, hung


def learn(watchdog: Watchdog, name: str, seconds: float = 0.0, units: int = 1, phases: int = 3) -> None:
    for _ in range(phases):
        with watchdog.phase(name, units):
            time.sleep(seconds)


def test_a_phase_past_its_deadline_is_named_once_with_what_was_learned() -> None:
    with watching() as (watchdog, hung):
        learn(watchdog, "update")
        with watchdog.phase("step"), watchdog.phase("update"):
            assert hung.said.wait(10)
            time.sleep(5 * TICK)
    (reason,) = hung.reasons
    assert reason.startswith("`update` has hung: it takes ")
    assert reason.endswith("and the longest of 3 before it took 0.0 s")


@pytest.mark.parametrize(
    ("name", "seconds", "units", "phases"),
    [("update", 0.0, 1, 2), ("another", 0.0, 1, 3), ("update", 0.25, 1, 3), ("update", 0.05, 1, 3)],
    ids=["too few", "another name", "as long before", "as long for each unit"],
)
def test_a_phase_that_takes_as_long_as_others_did_has_not_hung(
    name: str, seconds: float, units: int, phases: int
) -> None:
    with watching() as (watchdog, hung):
        learn(watchdog, name, seconds, units, phases)
        with watchdog.phase("update", 10 if seconds == 0.05 else 1):
            assert not hung.said.wait(2 * LEAST)


def test_a_phase_that_fails_is_over_and_teaches_nothing() -> None:
    with watching() as (watchdog, hung):
        learn(watchdog, "update", phases=2)
        with pytest.raises(ValueError, match="wrong"), watchdog.phase("update"):
            raise ValueError("wrong")
        with watchdog.phase("update"):
            assert not hung.said.wait(2 * LEAST)
        assert not hung.said.wait(2 * LEAST)


def test_each_job_of_a_process_learns_anew() -> None:
    watchdog, hung = Watchdog(TICK), Hung()
    with watchdog.watching(2.0, LEAST, hung):
        learn(watchdog, "update")
    with watchdog.watching(2.0, LEAST, hung), watchdog.phase("update"):
        assert not hung.said.wait(2 * LEAST)


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr("rlhf_core.system.watchdog.time.monotonic", lambda: monotonic() + stopped)
    with watching(least=5.0) as (watchdog, hung):
        learn(watchdog, "update")
        with watchdog.phase("update"):
            stopped = 3600.0
            assert not hung.said.wait(10 * TICK)
