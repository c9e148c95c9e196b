"""The body of every stage, independent of Prefect: key → reuse? → spec → Ray job → artifact."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Protocol

from rlhf_core.actors import forwarding
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.job_logs import write_log
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StageError, StoreError
from rlhf_core.graph.graph import Node
from rlhf_core.graph.user_files import named_variables
from rlhf_core.pipeline.specs import RunSettings, store_spec
from rlhf_core.system.stopping import grace_seconds
from tasks.followers import Follower
from tasks.job_end import JobEndedError, JobNotStartedError, JobPreemptedError, JobStuckError
from tasks.job_request import JobRequest, id_prefix
from tasks.ray_jobs import JobWatcher, RayJobs


@dataclass(frozen=True, slots=True)
class StageResult:
    manifest: Manifest
    reused: bool
    seconds: float  # that this run spent on it


class StageWatcher(JobWatcher, Protocol):
    def stuck(self, reason: str) -> None:
        """Receive why the job has hung; it is submitted again, or the stage fails."""

    def submitted(self, job_id: str, attached: bool) -> None:
        """Receive the id of the stage's Ray job, which was running already if `attached`."""


def run_stage(
    node: Node, settings: RunSettings, repository: ArtifactRepository, jobs: RayJobs, watcher: StageWatcher
) -> StageResult:
    """Return the artifact of `node`: from the store if it is there, else computed by a job, followed to its end.

    A cancellation or Ctrl-C stops the job, unless another run follows it, waits until it has stopped, and is raised
    again. Any other exception, such as that of a log line to a closed terminal, leaves the job running: the next
    attempt attaches to it.
    Raises StageError with the job's last error and the location of its log.
    """
    began = time.monotonic()
    manifest = repository.manifest(node.ref)
    if manifest is not None:
        return StageResult(manifest, reused=True, seconds=time.monotonic() - began)
    store_spec(node, settings, repository)
    try:
        request = _request(node, settings, _memory(node, repository))
        restarts = 0 if settings.watchdog is None else settings.watchdog.restarts
        follower = Follower(repository.store, request.id_prefix, settings.run_id)
        _compute(
            request, jobs, watcher, follower, may_restart=lambda: _times_stuck(repository.store, node.ref) <= restarts,
            keep_log=partial(write_log, repository.store, node.ref),
        )  # fmt: skip
    except StageError as error:
        raise type(error)(f"{node.name}: {error}") from error
    manifest = repository.manifest(node.ref)
    if manifest is None:
        raise StageError(f"{node.name}: its job ended without error, but {node.ref} is not in the store")
    return StageResult(manifest, reused=False, seconds=time.monotonic() - began)


def _memory(node: Node, repository: ArtifactRepository) -> int:
    """Return the bytes of host memory that the job's own process reserves."""
    inputs = [repository.manifest(ref) for ref in node.input_refs.values()] if node.config.input_copies else []
    return node.stage.job_memory(node.config, (manifest for manifest in inputs if manifest is not None))


def _times_stuck(store: Store, ref: ArtifactRef) -> int:
    """Return how many attempts in a row have hung since the last checkpoint."""
    attempts = Attempts(store, ref).all()[::-1]
    in_a_row = takewhile(lambda each: each.outcome == "stuck", attempts)
    return sum(each.resumed_after == attempts[0].resumed_after for each in in_a_row)


def stop_jobs_of(run_id: str, store: Store, jobs: RayJobs) -> list[str]:
    """Stop the jobs that only this run follows, for a run whose process could not; return their ids.

    Raises StageError if a job lives on, JobEndedError if the cluster is lost, StoreError.
    """
    followed = [
        job_id for job_id in jobs.running() if Follower(store, id_prefix(job_id), run_id).leave_and_stop(job_id)
    ]
    if followed:
        with ThreadPoolExecutor(len(followed)) as threads:
            list(threads.map(lambda job_id: jobs.stop(job_id, timeout=15 + grace_seconds()), followed))
    return followed


def _compute(
    request: JobRequest,
    jobs: RayJobs,
    watcher: StageWatcher,
    follower: Follower,
    *,
    may_restart: Callable[[], bool],
    keep_log: Callable[[str, str], None],
) -> None:
    """may_restart: asked for a job that has hung. keep_log: gets the id and the log of each job that has ended."""
    with follower:
        stopped = follower.join()
        if stopped:
            jobs.stop(stopped)  # its last follower was cancelled, and may have died before it did this
        while True:
            try:
                job_id, attached = jobs.submit_or_attach(request, watcher, stopped=stopped)
            except StageError:
                follower.leave()
                raise
            try:
                watcher.submitted(job_id, attached)
                jobs.follow(job_id, watcher, partial(_try_to_keep, keep_log, watcher, job_id))
            except (JobNotStartedError, JobPreemptedError, JobStuckError) as error:
                if isinstance(error, JobStuckError):
                    watcher.stuck(str(error))
                    if not may_restart():
                        follower.leave()
                        raise
                watcher.line(f"{error}: submitting it again")
                continue
            except JobEndedError:
                follower.leave()
                raise
            except (StageError, KeyboardInterrupt):  # cancelled
                if follower.leave_and_stop(job_id):
                    jobs.stop(job_id)
                    with suppress(StageError):  # its log is lost: what is raised is the cancellation
                        _try_to_keep(keep_log, watcher, job_id, jobs.log(job_id))
                raise
            follower.leave()
            return


def _try_to_keep(keep_log: Callable[[str, str], None], watcher: StageWatcher, job_id: str, log: str) -> None:
    """Keep the log of a job, unless the store fails: the result is there without it."""
    try:
        keep_log(job_id, log)
    except StoreError as error:
        watcher.line(f"the log of the job {job_id} is not in the store: {error}")


def _request(node: Node, settings: RunSettings, memory: int) -> JobRequest:
    command = ["python", "-m", "rlhf_core.stages", "--store", settings.store_url,
               "--stage", node.stage.name, "--key", node.ref.key]  # fmt: skip
    named = named_variables(node.config)
    environment = {n: value for n, value in os.environ.items() if n.startswith(forwarding.STANDARD) or n in named}
    return JobRequest(
        store=settings.store_url,
        stage=node.stage.name,
        key=node.ref.key,
        entrypoint=f"exec {shlex.join(command)}",  # no shell between Ray's signals and the stage
        environment=environment,
        metadata={"node": node.name, "run_id": settings.run_id},
        cpus=node.stage.job_cpus(node.config),
        memory=memory,
    )
