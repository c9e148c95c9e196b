"""Lines of the logs of a run's jobs, as Ray or the store has them, each with the process that printed it."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from deployments.cli.documents.runs import LogLine
from rlhf_core.artifacts.job_logs import read_logs
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.errors import StackError, StageError, StoreError
from rlhf_core.pipeline.record import read_record, read_start
from rlhf_core.tracking.protocol import Progress, parse
from tasks.job_log import LINE_OF_RAY
from tasks.ray_jobs import RayJobs, StageJob

_POLL_SECONDS = 2.0
_KEY_DIGITS = 16  # in the id of a job
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Before a line that Ray forwards from an actor to its job's driver.
_ACTOR = re.compile(r"\((?P<name>\w+) pid=(?P<pid>\d+)(?:, ip=[^)]+)?\) ?(?P<line>.*)")
_PROCESSES = {"_Rank": "rank", "EngineActor": "engine"}  # by the class of the actor


def stored_lines(connected: Callable[[], RayJobs], of: str) -> Iterator[LogLine]:
    """Yield the lines of all jobs of a run or a stage, job by job: of those that Ray has forgotten, from the store.

    Raises StackError if neither has any of them, StoreError.
    """
    logs = _kept_logs(of)
    try:
        jobs = connected()
        known = _jobs_of(jobs, of)
    except StackError:
        if not logs:
            raise
        known = []
    for job_id, (node, log) in logs.items():
        if job_id not in {job.id for job in known}:
            yield from _log_lines(job_id, node, log)
    for job in known:
        yield from _log_lines(job.id, job.node, jobs.log(job.id))


def _kept_logs(of: str) -> dict[str, tuple[str, str]]:
    """Return the node and the log of each job of a run by its id, or of an artifact by its name, by the job's id."""
    stage, slash, digits = of.partition("/")
    try:
        store = open_store(store_url())
        if slash:
            return {job_id: (stage, log) for job_id, log in read_logs(store, f"stages/{stage}/{digits}").items()}
        start = read_start(store, of) if of else None
    except StoreError:  # no store is needed to read the logs of a cluster
        return {}
    if start is None:
        return {}
    computed = {name: ref for name, ref in start.nodes.items() if name not in start.reused}
    return {
        job_id: (name, log)
        for name, ref in computed.items()
        for job_id, log in read_logs(store, f"{ref.path}/").items()
    }


def followed_lines(jobs: RayJobs, of: str) -> Iterator[LogLine]:
    """Yield the lines as they come, until none of the jobs is at work and no new one has come for some seconds."""
    lines: queue.Queue[LogLine] = queue.Queue()
    stop, followed = threading.Event(), dict[str, threading.Thread]()
    try:
        idle_polls = 0
        while idle_polls < 3:  # a run submits the next stage a moment after the last
            for job in _jobs_of(jobs, of):
                if job.id not in followed:
                    thread = threading.Thread(target=_follow, args=(jobs, job, lines.put, stop), daemon=True)
                    followed[job.id] = thread
                    thread.start()
            idle_polls = 0 if any(thread.is_alive() for thread in followed.values()) else idle_polls + 1
            yield from _until(lines, time.monotonic() + _POLL_SECONDS)
    finally:
        stop.set()


def _until(lines: queue.Queue[LogLine], deadline: float) -> Iterator[LogLine]:
    with suppress(queue.Empty):
        while True:
            yield lines.get(timeout=max(0.0, deadline - time.monotonic()))


def _follow(jobs: RayJobs, job: StageJob, put: Callable[[LogLine], None], stop: threading.Event) -> None:
    class Watcher:
        def progress(self, progress: Progress) -> None:
            put(LogLine(job.id, job.node, "driver", None, str(progress)))

        def line(self, line: str) -> None:
            for each in _log_line(job.id, job.node, line):
                put(each)

        def cancelled(self) -> bool:
            return stop.is_set()

    with suppress(StageError):  # of a job that failed: its last line says why
        jobs.follow(job.id, Watcher())


def _jobs_of(jobs: RayJobs, of: str) -> list[StageJob]:
    """Return the jobs of a run by its id, of an artifact by its name, or the newest one of a node."""
    known = jobs.jobs()
    stage, slash, digits = of.partition("/")
    if slash:
        found = [job for job in known if job.id.startswith(f"{stage}-{digits[:_KEY_DIGITS]}")]
    else:
        prefixes = _prefixes_of_run(of)
        found = [job for job in known if job.run_id == of or job.id.startswith(prefixes)]
        found = found or [job for job in known if job.node == of][-1:]
    if not found:
        raise StackError(
            f"the Ray cluster at {jobs.address} has no job of `{of}`, and the store no log: its stages were reused and "
            "had none, or the cluster that ran them is gone; name the run or the stage/key"
        )
    return found


def _prefixes_of_run(run_id: str) -> tuple[str, ...]:
    """Return how the ids of the jobs begin that a recorded run may have attached to; none without a record."""
    try:
        record = read_record(open_store(store_url()), run_id) if run_id else None
    except StoreError:  # no store is needed to read the logs of a cluster
        return ()
    nodes = () if record is None else record.nodes
    return tuple(f"{node.ref.stage}-{node.ref.key[:_KEY_DIGITS]}-" for node in nodes if node.outcome != "reused")


def _log_lines(job_id: str, node: str, log: str) -> Iterator[LogLine]:
    for line in log.splitlines():
        yield from _log_line(job_id, node, line)


def _log_line(job_id: str, node: str, text: str) -> Iterator[LogLine]:
    message = parse(text)
    if message is not None:
        yield LogLine(job_id, node, "driver", None, str(message))
        return
    plain = _COLOUR.sub("", text)
    if match := _ACTOR.match(plain):
        process = _PROCESSES.get(match["name"], match["name"])
        yield LogLine(job_id, node, process, int(match["pid"]), match["line"])
    elif plain.strip() and not plain.startswith(LINE_OF_RAY):
        yield LogLine(job_id, node, "driver", None, plain)
