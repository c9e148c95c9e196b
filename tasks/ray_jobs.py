"""Client of the Ray Jobs API: submit or attach, follow, stop. The only code that uses the API.

A job is a stage's process on the cluster, which outlives the process that submitted it.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from tenacity import RetryError, Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_exponential

from rlhf_core.actors import forwarding
from rlhf_core.actors.placement import runtime_environment
from rlhf_core.actors.room import NODES, Bundle, alive_nodes, autoscaling, is_starting, require_possible
from rlhf_core.errors import StackError, StageError
from rlhf_core.system.stopping import grace_seconds
from rlhf_core.tracking.protocol import Progress
from tasks.job_end import JobCancelledError, JobEndedError, JobUnknownError, in_one_line, require_success
from tasks.job_log import JobLog
from tasks.job_request import JobRequest, is_job_id
from tasks.shipped_code import shipped_code

_REQUEST_SECONDS = 30.0
_POLL_SECONDS = 0.5
_FIRST_POLL_SECONDS = 0.1  # of a job that is young, and may be short
_PENDING_SECONDS = 5.0  # after which a job that has not started is reported as waiting
_PACKAGES = "/api/packages/gcs"
_OF_EVERY_JOB: Mapping[str, str] = {
    "PYTHONUNBUFFERED": "1",
}
_CLEANUP_SECONDS = 10  # of a stopped job; killed earlier, it would leave its lease and its folders

Result = TypeVar("Result")


class JobWatcher(Protocol):
    def progress(self, progress: Progress) -> None:
        """Receive the job's progress."""

    def line(self, line: str) -> None:
        """Receive a line of the job's output, without its newline."""

    def cancelled(self) -> bool:
        """Return True once the job must be stopped. Called twice a second or more often."""


@dataclass(frozen=True, slots=True)
class StageJob:
    """An attempt at a stage on the cluster."""

    id: str
    node: str  # in the recipe
    run_id: str  # of the run that submitted it; others may have attached to it
    ended: bool
    started_ms: int


class _Client(JobSubmissionClient):
    """Client with a timeout: requests of a frozen head would otherwise wait for ever."""

    def __init__(self, address: str, patience: float = _REQUEST_SECONDS):
        self._timeout = min(patience, _REQUEST_SECONDS)
        super().__init__(address)
        self._ssl_context = True  # type: ignore[assignment]  # the default, which aiohttp must be given

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": self._timeout, **options})


def connect(patience: float = 60.0) -> RayJobs:
    """Connect to the cluster in RAY_API_SERVER_ADDRESS (its dashboard, http://…) or RAY_ADDRESS.

    patience: see RayJobs.

    Raises StackError if neither is set or no dashboard responds there.
    """
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not address:
        raise StackError(
            "no Ray cluster is configured: run `alignment up`, or set RAY_API_SERVER_ADDRESS to a dashboard, http://host:8265"
        )
    try:
        return RayJobs(_Client(address, patience), patience=patience)
    except RayError as error:
        raise StackError(
            f"the Ray dashboard at {address} rejected the request ({in_one_line(error)}): check RAY_AUTH_TOKEN"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise StackError(
            f"no Ray dashboard answers at {address} ({in_one_line(error)}): run `alignment up`, or correct the address"
        ) from error


class RayJobs:
    """The jobs of a cluster.

    patience: seconds that the dashboard may be unreachable before the cluster counts as lost.
    """

    def __init__(self, client: JobSubmissionClient, *, patience: float = 60.0):
        self._client = client
        self._patience = patience

    @property
    def address(self) -> str:
        return self._client.get_address()

    def where_is_the_log(self, job_id: str) -> str:
        return f"full log: `ray job logs {job_id}` or {self.address}/#/jobs/{job_id}"

    def submit_or_attach(
        self, request: JobRequest, watcher: JobWatcher | None = None, *, stopped: str | None = None
    ) -> tuple[str, bool]:
        """Return the id of the job that computes `request`, and whether it existed already.

        watcher: receives the progress while the cluster starts, and may cancel.
        stopped: the id of a job that is being stopped, which is never attached to: if it has not started yet, it ends
        as soon as it does. The next job has a higher number, also on a cluster that does not know that one.
        Raises StageError if the cluster rejects the job or its nodes could never hold it, JobEndedError if the cluster
        is lost or none of its nodes comes, JobCancelledError if `watcher` cancels.
        """
        self._require_room(request, watcher)
        while True:
            attempt, status = self._newest_attempt(request.id_prefix)
            newest = f"{request.id_prefix}{attempt}"
            if status is not None and not status.is_terminal() and newest != stopped:
                return newest, True
            last = int(stopped.removeprefix(request.id_prefix)) if stopped else 0
            job_id = f"{request.id_prefix}{max(attempt, last) + 1}"
            try:
                self._call(partial(self._submit, job_id, request))
            except RuntimeError as error:
                # Another orchestrator was faster, or our first request had arrived although its answer had not.
                if "already exists" not in str(error):
                    raise StageError(f"Ray refused the job {job_id}: {in_one_line(error)}") from error
                continue
            return job_id, False

    def follow(self, job_id: str, watcher: JobWatcher, keep_log: Callable[[str], None] = lambda log: None) -> None:
        """Follow the job until it succeeds; its lines and its progress are passed to `watcher` as they come.

        A job that a busy cluster has no room for is waited for as long as it takes. keep_log: gets the whole log once
        the job has ended, however it did.
        Raises JobEndedError if it ends otherwise or is lost, its subclass JobNotStartedError if Ray gave it up before
        its start, and JobCancelledError if `watcher` cancels; then it still has to be stopped.
        """
        log = JobLog(self._client, job_id, watcher.line, watcher.progress)
        waiting_since, waits = time.monotonic(), False
        try:
            while True:
                log.deliver(wait_seconds=_poll_seconds(time.monotonic() - waiting_since))
                if watcher.cancelled():
                    raise JobCancelledError(f"cancelled; the job {job_id} is being stopped")
                details = self._details(job_id)
                if details.status.is_terminal():
                    break
                waited = time.monotonic() - waiting_since
                if details.status == JobStatus.PENDING and waited > _PENDING_SECONDS and not waits:
                    waits = True
                    watcher.progress(Progress(0, 0, "waiting for Ray, which has no room for the job", {}, None))
            whole_log = partial(self._call, partial(self._client.get_job_logs, job_id))
            # A process that ended well has written all its lines; one that was killed may have children that still do.
            keep_log(log.finish(whole_log, settled=details.status == JobStatus.SUCCEEDED))
        finally:
            log.close()
        require_success(job_id, details, log, self.where_is_the_log(job_id))

    def stop(self, job_id: str, *, timeout: float | None = None) -> str:
        """Stop the job, wait until it has ended, and return its final status. A no-op if it has ended already.

        A job that ended with an earlier cluster at this address, which this one does not know, is STOPPED.

        timeout: in seconds; by default 25 and those that it has for a checkpoint. A job that is still PENDING after it
        is left to Ray, which stops it as soon as it starts.
        Raises StageError if it lives on, JobEndedError if the cluster is lost.
        """
        timeout = 25.0 + grace_seconds() if timeout is None else timeout
        deadline = time.monotonic() + timeout
        try:
            variables = (self._details(job_id).runtime_env or {}).get("env_vars", {})
        except JobUnknownError:
            return str(JobStatus.STOPPED)
        if package := variables.get(forwarding.NAME_VARIABLE):
            self._call(lambda: self._discard_variables(package))
        while True:
            status = self._details(job_id).status
            if status.is_terminal():
                return str(status)
            if time.monotonic() > deadline:
                if status == JobStatus.PENDING:
                    return str(status)
                raise StageError(f"the job {job_id} is still {status} {timeout:.0f} s after its stop: "
                                 f"stop it with `ray job stop {job_id}`")  # fmt: skip
            # Asked again and again: a job that is starting may miss one.
            self._call(lambda: self._client.stop_job(job_id))
            time.sleep(_POLL_SECONDS)

    def running(self) -> list[str]:
        """Return the ids of the unfinished jobs of all stages and stores."""
        return [job.id for job in self.jobs() if not job.ended]

    def jobs(self) -> list[StageJob]:
        """Return the jobs of all stages and stores that the cluster remembers, oldest first."""
        jobs = [
            StageJob(job.submission_id, metadata.get("node", ""), metadata.get("run_id", ""), job.status.is_terminal(),
                     job.start_time or 0)
            for job in self._call(self._client.list_jobs)
            if job.submission_id and is_job_id(job.submission_id)
            for metadata in [job.metadata or {}]
        ]  # fmt: skip
        return sorted(jobs, key=lambda job: (job.started_ms, job.id))

    def log(self, job_id: str) -> str:
        """Return what the job has printed so far: its driver's output, and that of its ranks and engines."""
        log: str = self._call(lambda: self._client.get_job_logs(job_id))
        return log

    def _newest_attempt(self, prefix: str) -> tuple[int, JobStatus | None]:
        attempts = {
            int(job.submission_id.removeprefix(prefix)): job.status
            for job in self._call(self._client.list_jobs)
            if job.submission_id and job.submission_id.startswith(prefix)
        }
        newest = max(attempts, default=0)
        return newest, attempts.get(newest)

    def _submit(self, job_id: str, request: JobRequest) -> str:
        shown, hidden = forwarding.divided(request.environment)
        package = f"{job_id}-{secrets.token_hex(8)}.zip"
        if hidden:
            self._store_variables(package, hidden)
            shown[forwarding.NAME_VARIABLE] = package
        try:
            with shipped_code() as code:
                environment = runtime_environment({**_OF_EVERY_JOB, **_stop_variables(), **shown})
                submitted: str = self._client.submit_job(
                    submission_id=job_id,
                    entrypoint=request.entrypoint,
                    entrypoint_num_cpus=request.cpus,
                    entrypoint_memory=request.memory or None,
                    runtime_env=environment | ({} if code is None else {"working_dir": str(code)}),
                    metadata=dict(request.metadata),
                )
        except RuntimeError:
            self._discard_variables(package)
            raise
        return submitted

    def _require_room(self, request: JobRequest, watcher: JobWatcher | None) -> None:
        """Raise StageError if no node of the cluster, even idle, could hold the job's own process."""
        amounts = {name: amount for name, amount in (("CPU", request.cpus), ("memory", request.memory)) if amount}
        if amounts and not autoscaling():
            require_possible([amounts], self._nodes(watcher))

    def _nodes(self, watcher: JobWatcher | None) -> list[Bundle]:
        """Return the resources of each node. Waits for a starting cluster as long as for an unreachable one."""
        began, waits = time.monotonic(), False
        while is_starting(nodes := self._call(self._alive_nodes)):
            if time.monotonic() - began > self._patience:
                raise JobEndedError(
                    f"no node of the Ray cluster at {self.address} has had a CPU for {self._patience:.0f} s: see "
                    "`alignment status`; run again once one has, finished stages are reused"
                )
            if watcher is not None and watcher.cancelled():
                raise JobCancelledError("cancelled while the Ray cluster was starting; no job was submitted")
            if watcher is not None and not waits:
                waits = True
                watcher.progress(Progress(0, 0, "waiting for Ray, which is starting: no node has a CPU yet", {}, None))
            time.sleep(_POLL_SECONDS)
        return nodes

    def _alive_nodes(self) -> list[Bundle]:
        answer = self._client._do_request("GET", NODES)
        if answer.status_code >= 500:  # of a dashboard whose head is not there yet
            raise RuntimeError(f"Ray does not say which nodes it has: status code {answer.status_code}")
        if answer.status_code != 200:
            raise StageError(f"Ray does not say which nodes it has: status code {answer.status_code}")
        return alive_nodes(answer.json())

    def _store_variables(self, package: str, environment: Mapping[str, str]) -> None:
        answer = self._client._do_request("PUT", f"{_PACKAGES}/{package}", data=forwarding.encode(environment))
        if answer.status_code != 200:
            raise RuntimeError(f"storing its variables: status code {answer.status_code}")

    def _discard_variables(self, package: str) -> None:
        """Discard the variables of a job that will not take them itself.

        Requesting a package hands it to Ray, which deletes it in minutes if no job uses it; the API has no request that
        deletes one.
        """
        self._client._do_request("GET", f"{_PACKAGES}/{package}")

    def _details(self, job_id: str) -> JobDetails:
        try:
            return self._call(lambda: self._client.get_job_info(job_id))
        except RuntimeError as error:
            if "status code 404" not in str(error):
                raise StageError(f"Ray did not return the status of the job {job_id}: {in_one_line(error)}") from error
            raise JobUnknownError(
                f"the Ray cluster at {self.address} no longer knows the job {job_id}: its head was restarted; "
                "run again, finished stages are reused"
            ) from error

    def _call(self, function: Callable[[], Result]) -> Result:
        """Retry a request over connection blips. Raises JobEndedError if they last longer than the patience."""
        try:
            return Retrying(
                retry=retry_if_exception(_is_blip),
                # Twice at least: a process that was suspended during a request finds it timed out, and the head well.
                stop=stop_after_delay(self._patience) & stop_after_attempt(2),
                wait=wait_exponential(multiplier=0.2, max=2.0),
            )(function)
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise JobEndedError(
                f"lost the Ray cluster: nothing answers at {self.address} since {self._patience:.0f} s "
                f"({in_one_line(cause)}); run again once it is back, finished stages are reused"
            ) from cause


def _stop_variables() -> dict[str, str]:
    """Return the variables of Ray's supervisor of a job, and of the job, for a stop.

    Ray sends its signal to the job's children too. Those that run user code leave SIGINT to the job, as in a terminal:
    rewards and environments are needed until the step ends.
    """
    grace = grace_seconds()
    return {
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(grace) + _CLEANUP_SECONDS),
        "ALIGNMENT_STOP_SECONDS": f"{grace:g}",
    }


def _poll_seconds(followed: float) -> float:
    """Return the interval between polls of a job's status: a tenth of the time `followed`, within bounds."""
    return min(_POLL_SECONDS, max(_FIRST_POLL_SECONDS, followed / 10))


def _is_blip(error: BaseException) -> bool:
    """Return whether to retry: connection errors, and 5xx responses without a type, of a dashboard without its head."""
    return isinstance(error, OSError) or (
        isinstance(error, RuntimeError) and "status code 5" in str(error) and "already exists" not in str(error)
    )
