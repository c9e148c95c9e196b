"""A job that is stopped writes a checkpoint, from which the next ends to the bit where one would have.

tests/two_nodes has the job whose node is drained.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from tasks.job_end import JobCancelledError
from tasks.ray_jobs import connect
from tests.tasks.stopped_jobs import STEPS, Run, Watcher, sft_inputs

pytestmark = pytest.mark.system


@pytest.mark.endurance("chaos")
@pytest.mark.slow("three jobs with a rank")
def test_a_cancelled_job_writes_a_checkpoint_that_the_next_resumes_from(
    ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    jobs, inputs = connect(), sft_inputs(tmp_path)
    stopped, whole = (
        Run(LocalStore(tmp_path / name / "store"), inputs, tmp_path / name) for name in ("stopped", "whole")
    )
    watcher = Watcher(lambda: watcher.cancel.set())
    with pytest.raises(JobCancelledError):
        stopped.compute(jobs, watcher)
    step = stopped.checkpoints.newest_step()
    assert step is not None
    assert 20 <= step < STEPS  # none was due for ten minutes
    again = Watcher()
    stopped.compute(jobs, again)
    assert f"resumes after step {step}" in again.said
    whole.compute(jobs, Watcher())
    assert stopped.result(tmp_path / "cache") == whole.result(tmp_path / "cache")
