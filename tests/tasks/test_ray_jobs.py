"""The Jobs API of a real Ray head."""

import hashlib
import json
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.actors.forwarding import NAME_VARIABLE
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.errors import StackError, StageError
from rlhf_core.tracking.protocol import Progress
from tasks.followers import Follower
from tasks.job_end import JobCancelledError, JobEndedError, cause_of_end
from tasks.job_log import LINE_OF_RAY
from tasks.job_request import JobRequest
from tasks.ray_jobs import RayJobs, _Client, connect
from tasks.stage import _compute
from tests.cluster import Service, start_ray

pytestmark = pytest.mark.system

STARTING = "waiting for Ray, which is starting: no node has a CPU yet"
SLEEP = "import time; print('started', flush=True); time.sleep(300)"

RECEIVE = "from rlhf_core.actors.forwarding import receive; receive()"


class Watcher:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stuck_for: list[str] = []
        self.seen: list[Progress] = []
        self.jobs: list[tuple[str, bool]] = []
        self.cancel = threading.Event()

    def submitted(self, job_id: str, attached: bool) -> None:
        self.jobs.append((job_id, attached))

    def progress(self, progress: Progress) -> None:
        self.seen.append(progress)

    def stuck(self, reason: str) -> None:
        self.stuck_for.append(reason)

    def line(self, line: str) -> None:
        if not line.startswith(LINE_OF_RAY) and "job_manager.py" not in line:  # Ray's own first lines
            self.lines.append(line)

    def cancelled(self) -> bool:
        return self.cancel.is_set()


PLACE = hashlib.sha256(b"/store ").hexdigest()[:8]


def python(code: str, key: str, **metadata: str) -> JobRequest:
    """A job that runs `code`; `key` tells it from the other tests' jobs on the same cluster."""
    return JobRequest(
        "/store", "sft", f"{key:0<64}", f"exec python -c {shlex.quote(code)}", {"GREETING": "hello"}, metadata, cpus=1.0
    )


@pytest.fixture
def jobs(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    return connect()


def test_lines_and_progress_arrive_in_order_and_once(jobs: RayJobs) -> None:
    progress = '{"step": 1, "total": 4, "phase": "rollout", "metrics": {"reward": 0.5}, "seconds_left": 90}'
    lines = f"'@progress {progress}', '@progress not json', 'bar 10%\\rbar 20%', 'the end'"
    # Ray's supervisor writes its first line beside a job that is as short as this one.
    code = f"import os, time; {RECEIVE}; time.sleep(1); print(os.environ['GREETING'], {lines}, sep='\\n', end='')"
    watcher = Watcher()
    job_id, attached = jobs.submit_or_attach(python(code, "a0"))
    assert (job_id, attached) == (f"sft-a000000000000000-{PLACE}-a1", False)
    jobs.follow(job_id, watcher)
    assert watcher.lines == [
        "hello", "@progress not json",
        "bar 10%", "bar 20%",  # Ray ends a line where a progress bar redraws its own
        "the end",
    ]  # fmt: skip
    assert watcher.seen == [Progress(1, 4, "rollout", {"reward": 0.5}, 90.0)]
    assert str(watcher.seen[0]) == "step 1 of 4 · rollout · reward 0.5 · 1:30 left"


def test_the_variables_of_a_job_are_not_in_its_description_and_can_be_taken_once(jobs: RayJobs) -> None:
    code = f"import os; name = os.environ['{NAME_VARIABLE}']; {RECEIVE}; print(len(os.environ['GREETING']), flush=True)"
    again = f"os.environ['{NAME_VARIABLE}'] = name; {RECEIVE}"
    request = replace(python(f"{code}; {again}", "a1"), environment={"GREETING": "a secret"})
    watcher = Watcher()
    job_id, _ = jobs.submit_or_attach(request)
    with pytest.raises(JobEndedError, match=r"no longer in Ray's store: run again"):
        jobs.follow(job_id, watcher)
    assert watcher.lines[0] == "8"
    client = jobs._client
    described = "".join(client._do_request("GET", f"/api/jobs/{end}").text for end in ("", job_id, f"{job_id}/logs"))
    assert job_id in described
    assert "a secret" not in described
    package = (client.get_job_info(job_id).runtime_env or {})["env_vars"][NAME_VARIABLE]
    assert client._do_request("GET", f"/api/packages/gcs/{package}").status_code == 404


def test_a_failed_job_gives_its_last_error_line_and_where_its_log_is(jobs: RayJobs) -> None:
    code = """print('@error {"type": "ValueError", "message": "the batch is empty"}'); raise SystemExit(1)"""
    job_id, _ = jobs.submit_or_attach(python(code, "b0"))
    with pytest.raises(
        JobEndedError, match=rf"^ValueError: the batch is empty; full log: `ray job logs {job_id}` or http"
    ):
        jobs.follow(job_id, Watcher())
    again, attached = jobs.submit_or_attach(python("print('fine now')", "b0"))
    assert (again, attached) == (f"sft-b000000000000000-{PLACE}-a2", False)
    jobs.follow(again, Watcher())


@pytest.mark.endurance("chaos")
def test_a_job_killed_without_a_word_gives_its_last_line(jobs: RayJobs) -> None:
    late = f"{LINE_OF_RAY}sft-b100000000000000-{PLACE}-a1: exec python"  # as it may come, see job_log.py
    code = f"import os; print('loading weights', '{late}', sep='\\n', flush=True); os.kill(os.getpid(), 9)"
    job_id, _ = jobs.submit_or_attach(python(code, "b1"))
    said = (
        r"^its process was killed \(signal 9\), usually because memory ran out\. Ray says: .*exit code -9; "
        "the log's last line: loading weights; full log"
    )
    with pytest.raises(JobEndedError, match=said):
        jobs.follow(job_id, Watcher())


@pytest.mark.parametrize(("message", "cause"), [
    ("Job entrypoint command failed with exit code 137", "its process was killed (signal 9)"),
    ("Job entrypoint command failed with exit code -11", "its process was ended by signal 11 (SIGSEGV), a crash in"),
    ("Job entrypoint command failed with exit code 3", "its process ended with status 3."),
    ("Unexpected error occurred: The actor died", "Ray lost its process"),
])  # fmt: skip
def test_the_cause_comes_before_what_ray_says(message: str, cause: str) -> None:
    said = cause_of_end(message)
    assert said.startswith(cause)
    assert said.endswith(f" Ray says: {message}")


def test_a_second_submitter_attaches_and_reads_the_log_from_its_start(jobs: RayJobs) -> None:
    code = "import time; print('one', flush=True); time.sleep(2); print('two')"
    first, _ = jobs.submit_or_attach(python(code, "c0"))
    time.sleep(1)
    second, attached = jobs.submit_or_attach(python(code, "c0"))
    assert (second, attached) == (first, True)
    watcher = Watcher()
    jobs.follow(second, watcher)
    assert watcher.lines == ["one", "two"]


def test_cancelled_then_stopped(jobs: RayJobs) -> None:
    watcher = Watcher()
    job_id, _ = jobs.submit_or_attach(python(SLEEP, "d0", run_id="run-d"))
    threading.Timer(1.5, watcher.cancel.set).start()
    with pytest.raises(JobCancelledError):
        jobs.follow(job_id, watcher)
    assert jobs.running() == [job_id]
    assert jobs.stop(job_id) == "STOPPED"
    assert jobs.running() == []
    with pytest.raises(JobEndedError, match="was stopped from outside"):
        jobs.follow(job_id, Watcher())


def test_a_job_that_was_stopped_on_an_earlier_cluster_is_submitted_again(jobs: RayJobs, tmp_path: Path) -> None:
    """As on a requeued Slurm job, whose Ray head has the address of the one before. Another run attaches to it."""
    request, store = python("import time; time.sleep(3); print('again')", "d1"), LocalStore(tmp_path / "store")
    before = f"{request.id_prefix}1"
    cancelled = Follower(store, request.id_prefix, "cancelled")
    cancelled.join()
    assert cancelled.leave_and_stop(before)
    runs = {name: (Watcher(), Follower(store, request.id_prefix, name)) for name in ("one", "two")}
    with ThreadPoolExecutor() as threads:
        compute = partial(_compute, may_restart=lambda: False, keep_log=lambda job_id, log: None)
        computed = [threads.submit(compute, request, jobs, *run) for run in runs.values()]
        assert [one.result() for one in computed] == [None, None]
    assert {job for watcher, _ in runs.values() for job, _ in watcher.jobs} == {f"{request.id_prefix}2"}
    assert [watcher.lines for watcher, _ in runs.values()] == [["again"], ["again"]]


def test_a_job_that_no_node_could_hold_is_refused(jobs: RayJobs) -> None:
    huge = replace(python("", "e0"), cpus=1000.0)
    with pytest.raises(
        StageError, match=r"^asked Ray for 1000 CPUs, the whole cluster has 4 CPUs; ask for less of it$"
    ):
        jobs.submit_or_attach(huge)
    with pytest.raises(StageError, match=r"^asked Ray for 1 CPUs and 1\.05e\+06 GiB of memory, the whole cluster has"):
        jobs.submit_or_attach(replace(huge, cpus=1.0, memory=2**50))
    assert jobs.running() == []


@pytest.mark.parametrize(
    ("kind", "jobs_of_it"),
    [pytest.param("PreemptedError", 3, marks=pytest.mark.endurance("chaos")), ("StuckError", 2), ("StageError", 1)],
)
def test_a_job_that_ends_itself_to_resume_is_submitted_again(
    jobs: RayJobs, tmp_path: Path, kind: str, jobs_of_it: int
) -> None:
    """One that has hung as often as it may; here the third attempt succeeds."""
    error = json.dumps({"type": kind, "message": "not now"})
    code = (
        f"import pathlib, sys; done = pathlib.Path({str(tmp_path / 'attempts')!r}); "
        f"number = int(done.read_text()) + 1 if done.exists() else 1; done.write_text(str(number)); "
        f"number > 2 or (print('@error ' + {error!r}), sys.exit(143))"
    )
    request, watcher = python(code, f"d{jobs_of_it}"), Watcher()
    follower = Follower(LocalStore(tmp_path / "store"), request.id_prefix, "run")
    may_restart, kept = iter([True, False]).__next__, dict[str, str]()
    if kind == "PreemptedError":
        _compute(request, jobs, watcher, follower, may_restart=may_restart, keep_log=kept.__setitem__)
    else:
        with pytest.raises(JobEndedError, match=f"^{kind}: not now; full log: "):
            _compute(
                request,
                jobs,
                watcher,
                follower,
                may_restart=may_restart,
                keep_log=kept.__setitem__,
            )
    assert len(kept) == jobs_of_it
    assert list(kept) == [job_id for job_id, _ in watcher.jobs]
    assert len(watcher.stuck_for) == (2 if kind == "StuckError" else 0)


@pytest.mark.endurance("chaos")
@pytest.mark.slow("starts a Ray head of its own twice")
def test_a_cluster_that_starts_is_full_and_is_lost(tmp_path: Path) -> None:
    """One test, since starting a head is what takes the time."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    head, address = start_ray(tmp_path / "ray.log", folder, cpus=0, RAY_JOB_START_TIMEOUT_SECONDS="8")
    try:
        head = wait_for_nodes_that_have_not_joined_yet(head, address, tmp_path)
        wait_for_room(address, tmp_path)
        lose(head, address)
    finally:
        head.end()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes_that_have_not_joined_yet(head: Service, address: str, folder: Path) -> Service:
    """As after the restart of a killed head, which answers before they have. The head with CPUs."""
    request, watcher = python("print('at last')", "h0"), Watcher()
    follower = Follower(LocalStore(folder / "store"), request.id_prefix, "run")
    with pytest.raises(JobEndedError, match=r"^no node of the Ray cluster at http.* has had a CPU for 1 s: see"):
        _compute(
            request, RayJobs(_Client(address), patience=1.0), watcher, follower,
            may_restart=lambda: False, keep_log=lambda job_id, log: None,
        )  # fmt: skip
    assert not follower._update(lambda record: record).expires_at
    assert [progress.phase for progress in watcher.seen] == [STARTING]
    watcher.cancel.set()
    jobs, again = RayJobs(_Client(address)), Watcher()
    with pytest.raises(JobCancelledError, match="no job was submitted"):
        jobs.submit_or_attach(request, watcher)

    with ThreadPoolExecutor() as threads:
        submitted = threads.submit(jobs.submit_or_attach, request, again)
        while not again.seen:
            time.sleep(0.1)
        head.end(signal.SIGKILL)
        command = [flag.replace("--num-cpus=0", "--num-cpus=4") for flag in head.command]
        head = Service(command, folder / "ray.log", head.environment)
        jobs.follow(submitted.result()[0], again)
    assert (again.seen[0].phase, again.lines) == (STARTING, ["at last"])
    return head


def wait_for_room(address: str, folder: Path) -> None:
    """Though Ray gives up what has not started after a while; and one that is stopped before its start never runs."""
    jobs, watcher = RayJobs(_Client(address)), Watcher()
    whole = replace(python("import time; print('started', flush=True); time.sleep(14)", "g0"), cpus=4.0)
    busy, _ = jobs.submit_or_attach(whole)
    while "started" not in jobs._client.get_job_logs(busy):
        time.sleep(0.2)
    unwanted = python(f"open({str(folder / 'ran')!r}, 'w')", "g1")
    first, _ = jobs.submit_or_attach(unwanted)
    assert jobs.stop(first, timeout=1.0) == "PENDING"
    second, attached = jobs.submit_or_attach(unwanted, stopped=first)
    assert (second, attached) == (f"{unwanted.id_prefix}2", False)
    assert jobs.stop(second, timeout=1.0) == "PENDING"
    waits = python("print('at last')", "g2")
    _compute(
        waits, jobs, watcher, Follower(LocalStore(folder / "store"), waits.id_prefix, "run"),
        may_restart=lambda: False, keep_log=lambda job_id, log: None,
    )  # fmt: skip
    assert watcher.seen[0].phase == "waiting for Ray, which has no room for the job"
    given_up = f"Ray gave up on the job {waits.id_prefix}1, for which the cluster had no free resources"
    assert (watcher.lines[0], watcher.lines[-1]) == (f"{given_up}: submitting it again", "at last")
    assert watcher.jobs[:2] == [(f"{waits.id_prefix}{attempt}", False) for attempt in (1, 2)]
    assert jobs.running() == []
    assert not (folder / "ran").exists()


def lose(head: Service, address: str) -> None:
    """It is said in one sentence."""
    jobs = RayJobs(_Client(address), patience=3.0)
    job_id, _ = jobs.submit_or_attach(python(SLEEP, "f0"))
    threading.Timer(2.0, lambda: head.end(signal.SIGKILL)).start()
    with pytest.raises(JobEndedError, match=r"^lost the Ray cluster: nothing answers at http://127.0.0.1:.*run again"):
        jobs.follow(job_id, Watcher())


def test_a_request_that_takes_longer_than_the_patience_is_repeated(jobs: RayJobs) -> None:
    """As after a suspension of the process, or of its machine, during a request."""
    answers: list[Callable[[], str]] = [_suspended, lambda: "answer"]
    assert RayJobs(jobs._client, patience=0.1)._call(lambda: answers.pop(0)()) == "answer"


def _suspended() -> str:
    time.sleep(0.2)
    raise TimeoutError


def test_no_cluster_is_known_or_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(StackError, match="no Ray cluster is configured: run `alignment up`"):
        connect()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(StackError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9"):
        connect()


@pytest.mark.endurance("chaos")
def test_jobs_of_two_stores_are_two_jobs(jobs: RayJobs) -> None:
    """On one cluster, where the second would else attach to the first and find nothing in its own store."""
    here = python("import time; time.sleep(60)", "f0")
    there = replace(here, store="/other", entrypoint="exec python -c pass")
    elsewhere = replace(there, store=here.store, environment={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    first, _ = jobs.submit_or_attach(here)
    try:
        for other in (there, elsewhere):
            job, attached = jobs.submit_or_attach(other)
            assert (job != first, attached) == (True, False)
            jobs.follow(job, Watcher())
        assert jobs.submit_or_attach(here) == (first, True)
    finally:
        jobs.stop(first)
