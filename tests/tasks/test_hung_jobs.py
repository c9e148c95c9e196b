"""A job whose rank hangs stores the stacks of its processes, ends, and resumes from its checkpoint: a bounded number of
times.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.watchdog import WatchdogConfig
from tasks.job_end import JobStuckError
from tasks.ray_jobs import connect
from tests.tasks.stopped_jobs import Run, Watcher, sft_inputs

pytestmark = pytest.mark.system

WATCHDOG = WatchdogConfig(factor=2, minutes=0.1, restarts=1)


def stop_the_rank() -> None:
    """Of this session's cluster."""
    (rank,) = (each for each in psutil.Process().children(recursive=True) if "ray::_Rank" in "".join(each.cmdline()))
    os.kill(rank.pid, signal.SIGSTOP)


@pytest.mark.endurance("benchmarks")
@pytest.mark.slow("jobs with a rank, two of which hang")
def test_a_hung_job_resumes_and_fails_the_second_time_in_a_row(
    ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    jobs = connect()
    run = Run(LocalStore(tmp_path / "store"), sft_inputs(tmp_path), tmp_path, WATCHDOG)
    with pytest.raises(JobStuckError, match=r"^StuckError: `train` has hung: it takes \d+ s, and the longest of \d+"):
        run.compute(jobs, watcher := Watcher(stop_the_rank, times=2))
    first, second = watcher.stuck_for
    assert [(each.outcome, each.resumed_after) for each in run.attempts] == [("stuck", None), ("stuck", None)]
    stacks = run.stacks(tmp_path / "cache")
    assert sorted(stacks) == [1, 2]
    assert "in train" in stacks[1]  # of the job itself
    assert "rank 0, process " in stacks[1]
    assert "its state is stopped" in stacks[1]
    assert "the stacks of its processes are in sft.stacks/" in first
    assert first != second
    # Nothing hangs any more: one more run ends it.
    run.compute(jobs, Watcher())
    assert run.attempts[-1].outcome == "published"
