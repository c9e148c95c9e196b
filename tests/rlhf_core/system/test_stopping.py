"""The first request of a stop counts, and its deadline interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from rlhf_core.errors import PreemptedError
from rlhf_core.stages.job import _end_stuck, _stop
from rlhf_core.system.stopping import STOPS, Stop


@pytest.fixture
def signalled() -> Iterator[threading.Event]:
    """Set by SIGTERM."""
    arrived = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: arrived.set())
    yield arrived
    STOPS.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_request_counts_and_its_deadline_sends_the_signal(signalled: threading.Event) -> None:
    STOPS.request(Stop("first", PreemptedError), seconds=0.05)
    STOPS.request(Stop("second"), seconds=600.0)
    assert STOPS.requested == Stop("first", PreemptedError)
    for _ in range(100):
        if signalled.wait(0.05):
            break
    assert signalled.is_set()


def test_a_signal_waits_for_the_end_of_a_step_a_second_one_and_one_outside_of_a_loop_do_not(
    signalled: threading.Event,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _stop(signal.SIGTERM, None)
    assert STOPS.requested is None
    STOPS.between_steps = True
    _stop(signal.SIGTERM, None)
    assert STOPS.requested == Stop("the job was stopped")
    with pytest.raises(KeyboardInterrupt):
        _stop(signal.SIGTERM, None)


def test_a_job_that_is_being_stopped_does_not_end_as_stuck(signalled: threading.Event) -> None:
    STOPS.request(Stop("the job was stopped"), seconds=60)
    _end_stuck("`update` has hung")
    assert STOPS.requested == Stop("the job was stopped")
