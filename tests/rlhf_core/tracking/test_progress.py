"""Progress lines: their content, their rate, and the time left."""

from __future__ import annotations

from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.tracking.protocol import Progress, parse


class _Job:
    """A clock that the test moves, and the lines written so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[Progress] = []
        self.progress = ProgressReporter(self._write, clock=lambda: self.now)

    def _write(self, line: str) -> None:
        progress = parse(line)
        assert isinstance(progress, Progress)
        self.lines.append(progress)

    def left(self) -> list[float | None]:
        return [line.seconds_left for line in self.lines]


def test_a_line_has_the_step_the_phase_and_the_metrics() -> None:
    job = _Job()
    job.progress.report(3, 10, "train", {"loss": 0.5})
    assert job.lines == [Progress(3, 10, "train", {"loss": 0.5}, None)]


def test_the_time_left_follows_the_pace() -> None:
    job = _Job()
    for step in range(4):
        job.progress.report(step, 10, "train")
        job.now += 2.0
    assert job.left() == [None, 18.0, 16.0, 14.0]


def test_only_the_newest_steps_set_the_pace() -> None:
    job = _Job()
    for step in range(100):
        job.now += 100.0 if step < 50 else 1.0
        job.progress.report(step, 200)
    assert job.left()[-1] == 101.0


def test_time_since_the_newest_step_is_subtracted() -> None:
    job = _Job()
    job.progress.report(0, 10)
    job.now = 10.0
    job.progress.report(1, 10)
    job.now = 15.0
    job.progress.report(1, 10)
    assert job.left() == [None, 90.0, 85.0]


def test_at_most_two_lines_a_second_but_never_without_the_last() -> None:
    job = _Job()
    for step in range(1, 101):
        job.now += 0.1
        job.progress.report(step, 100)
    assert len(job.lines) <= 22
    assert job.lines[-1].step == 100
    assert job.left()[-1] == 0.0


def test_a_new_phase_is_shown_at_once_and_restarts_the_clock() -> None:
    job = _Job()
    job.progress.report(0, 10, "fetch")
    job.now = 0.1
    job.progress.report(1, 10, "train")
    job.now = 1.1
    job.progress.report(2, 10, "train")
    assert job.left() == [None, None, 8.0]


def test_an_unknown_total_has_no_end() -> None:
    job = _Job()
    job.progress.report(100, 0, "reading")
    job.now = 5.0
    job.progress.report(200, 0, "reading")
    assert job.left() == [None, None]
