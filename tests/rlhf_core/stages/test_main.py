"""Jobs as they run on a cluster: processes of their own, on both kinds of store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.leases import Holder, LeaseRecord, lease_path, take_lease
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.stages.runner import run_job
from rlhf_core.tracking.protocol import JobError, parse
from tests.rlhf_core.stages.specs import QUICK, SLOW, specified

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("own_folders")]

REPOSITORY = Path(__file__).parents[3]


class Job:
    """`python -m rlhf_core.stages`, its output in a file as on a cluster."""

    def __init__(self, store: Store, ref: ArtifactRef, log: Path):
        self._log = log
        which = ["--store", store.url, "--stage", ref.stage, "--key", ref.key]
        command = [sys.executable, "-m", "rlhf_core.stages", *which]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
            )

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def error(self) -> JobError:
        """The message in the last line."""
        message = parse(self.output.splitlines()[-1])
        assert isinstance(message, JobError), self.output
        return message


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[_Jobs]:
    started = _Jobs(tmp_path)
    yield started
    for job in started.jobs:
        job.process.kill()
        job.process.wait()


class _Jobs:
    def __init__(self, folder: Path):
        self.jobs: list[Job] = []
        self._folder = folder

    def start(self, store: Store, ref: ArtifactRef) -> Job:
        self.jobs.append(Job(store, ref, self._folder / f"job{len(self.jobs)}.log"))
        return self.jobs[-1]


def _lease(store: Store, ref: ArtifactRef) -> LeaseRecord:
    data = store.get(lease_path(ref))
    assert data is not None
    return LeaseRecord.model_validate_json(data)


def test_a_job_publishes_what_its_spec_says(repository: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = specified(repository, tmp_path, QUICK)
    job = jobs.start(repository.store, spec.ref)
    assert job.wait() == 0, job.output
    manifest = repository.manifest(spec.ref)
    assert manifest is not None
    assert (manifest.kind, manifest.name, manifest.key) == (Kind.DATASET, "data.text", spec.key)
    assert [file.path for file in manifest.files] == ["data.arrow", "info.json", "metrics.jsonl"]
    assert manifest.metrics["rows"] == 2
    assert manifest.user_files == spec.user_files
    assert manifest.libraries == spec.libraries
    assert manifest.device == "cpu"
    assert 0 <= manifest.device_seconds < 60
    assert manifest.started_at < manifest.finished_at
    assert '@progress {"step": 0, "total": 0, "phase": "publish"' in job.output
    assert _lease(repository.store, spec.ref).released
    assert list((tmp_path / "work").iterdir()) == []


def test_an_error_of_the_user_is_the_last_line(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = specified(local, tmp_path, "def rows():\n    raise RuntimeError('no rows today')\n")
    job = jobs.start(local.store, spec.ref)
    assert job.wait() == 1
    assert "no rows today" in job.error.message
    assert job.error.type == "StageError"
    assert "Traceback (most recent call last)" in job.output
    assert local.manifest(spec.ref) is None
    assert _lease(local.store, spec.ref).released


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_job_gives_its_lease_back_and_publishes_nothing(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs, number: signal.Signals
) -> None:
    spec = specified(local, tmp_path, SLOW)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    assert not _lease(local.store, spec.ref).released
    job.process.send_signal(number)
    assert job.wait() == 143
    assert job.error == JobError("Stopped", "the job was stopped before it had finished; nothing was published")
    assert _lease(local.store, spec.ref).released
    assert local.manifest(spec.ref) is None
    assert [each.outcome for each in Attempts(local.store, spec.ref).all()] == ["stopped"]
    assert list((tmp_path / "work").iterdir()) == []


def test_a_stop_inside_a_callback_whose_errors_python_drops_is_not_lost(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs
) -> None:
    code = (
        "import os, signal, time, weakref\n\n"
        "class Thing:\n    pass\n\n"
        "def rows():\n    thing = Thing()\n"
        "    weak = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
        "    del thing\n    time.sleep(20)\n    return [{'text': 'one'}]\n"
    )
    spec = specified(local, tmp_path, code)
    job = jobs.start(local.store, spec.ref)
    assert job.wait() == 143, job.output
    assert "Exception ignored in" in job.output
    assert job.error == JobError("Stopped", "the job was stopped before it had finished; nothing was published")
    assert _lease(local.store, spec.ref).released


@pytest.mark.endurance("benchmarks")
@pytest.mark.slow("jobs that are stopped in order")
def test_a_job_that_waits_for_its_ray_workers_stops_in_order_too(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code = (
        "import time, ray\nfrom rlhf_core.actors.placement import connect\n\n"
        "@ray.remote\ndef work():\n    time.sleep(60)\n\n"
        "def rows():\n    connect()\n    print('at work', flush=True)\n    ray.get(work.remote())\n"
    )
    spec = specified(local, tmp_path, code)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    job.process.terminate()
    assert job.wait() == 143, job.output
    assert _lease(local.store, spec.ref).released


def test_a_killed_job_is_replaced_at_once_on_the_same_machine(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs
) -> None:
    # The function is slow only the first time: same code, same key.
    code = (
        "import pathlib, time\n\ndef rows():\n"
        f"    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        print('at work', flush=True)\n"
        "        time.sleep(60)\n"
        "    return [{'text': 'one'}]\n"
    )
    spec = specified(local, tmp_path, code)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    (known,) = Attempts(local.store, spec.ref).all()
    assert known.outcome == "killed"
    published = run_job(local.store.url, spec.ref)
    killed, last = published.attempts
    assert (killed.id, killed.outcome, killed.cores) == (known.id, "killed", 1.0)
    assert last.outcome == "published"
    assert [each.outcome for each in Attempts(local.store, spec.ref).all()] == ["killed", "published"]


@pytest.mark.endurance("benchmarks")
@pytest.mark.slow("jobs that are stopped in order")
def test_a_job_whose_lease_was_taken_stops_itself(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = specified(local, tmp_path, SLOW)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    thief = Holder(id="x", host="far", machine="another", pid=7, process_started=0.0)
    expires = datetime.now(UTC) + timedelta(seconds=60)
    local.store.put(
        lease_path(spec.ref), LeaseRecord(holder=thief, expires_at=expires, renewals=0).model_dump_json().encode()
    )
    assert job.wait() == 1  # at the next heartbeat
    assert job.error.type == "StageError"
    assert "was taken by process 7 on far" in job.error.message
    assert _lease(local.store, spec.ref).holder == thief


@pytest.mark.endurance("benchmarks")
def test_of_two_jobs_one_computes_and_the_other_waits(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    sign = tmp_path / "sign"
    waits = f"import pathlib\n    while not pathlib.Path({str(sign)!r}).exists(): time.sleep(0.05)"
    spec = specified(local, tmp_path, SLOW.replace("time.sleep(60)", waits))
    first = jobs.start(local.store, spec.ref)
    first.wait_for("at work")
    second = jobs.start(local.store, spec.ref)
    second.wait_for("waiting for process")
    sign.touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert "is in the store already" in second.output
    assert "at work" not in second.output


@pytest.mark.endurance("benchmarks")
def test_a_job_takes_over_when_the_other_fails(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = specified(local, tmp_path, QUICK)
    lease = take_lease(local.store, lease_path(spec.ref))
    assert not isinstance(lease, Holder)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("waiting for process")
    lease.release()
    assert job.wait() == 0
    assert local.manifest(spec.ref) is not None
