"""Failures of Ray jobs, and their causes in words."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.job_submission import JobDetails, JobErrorType, JobStatus

from rlhf_core.errors import NothingLeftError, PreemptedError, StageError, StuckError, shortened
from rlhf_core.processes.lines import how_it_ended
from tasks.job_log import JobLog


class JobEndedError(StageError):
    """The job failed, was stopped by someone else, or is lost with its cluster: there is nothing left to stop."""


class JobWithNothingLeftError(JobEndedError, NothingLeftError):
    """The job failed since its stage had no rows to make."""


class JobNotStartedError(JobEndedError):
    """Ray gave up the job before its process started, so that it may be submitted again."""


class JobPreemptedError(JobEndedError):
    """The job ended since a node of it is taken away; submitted again, it resumes on others."""


class JobStuckError(JobEndedError):
    """The job ended itself since a phase of it had hung; submitted again, it resumes from its newest checkpoint."""


class JobUnknownError(JobEndedError):
    """The cluster does not know the job: its head was restarted since, and the job ended with it."""


class JobCancelledError(StageError):
    """The job's watcher requested its end."""


_KINDS: Mapping[str, type[JobEndedError]] = {
    NothingLeftError.__name__: JobWithNothingLeftError,
    PreemptedError.__name__: JobPreemptedError,
    StuckError.__name__: JobStuckError,
}


def require_success(job_id: str, details: JobDetails, log: JobLog, where: str) -> None:
    """Raise JobEndedError if the job, which has ended, did not succeed. where: location of its log."""
    if details.status == JobStatus.SUCCEEDED:
        return
    if details.error_type == JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT:
        raise JobNotStartedError(f"Ray gave up on the job {job_id}, for which the cluster had no free resources")
    if details.status == JobStatus.STOPPED:
        raise JobEndedError(f"the job {job_id} was stopped from outside; {where}")
    # Ray's message repeats the end of the log after a comma.
    ended = in_one_line((details.message or "no reason given").partition(", last available logs")[0])
    reason = log.error or f"{cause_of_end(ended)}; the log's last line: {log.last_line or '(none)'}"
    raise _KINDS.get(log.error.type if log.error else "", JobEndedError)(f"{reason}; {where}")


def cause_of_end(message: str) -> str:
    """Return the likely cause of the end of a job that printed no error, then Ray's message."""
    match = re.search(r"exit code (-?\d+)", message)
    status = int(match[1]) if match else 0
    lost = "Ray lost its process, which was killed or whose node was lost"
    cause = f"its process {how_it_ended(status)}" if status else lost
    return f"{cause}. Ray says: {message}"


def in_one_line(error: object) -> str:
    """Format an error in one line of 300 characters at most."""
    return shortened(" ".join(str(error).split()), 300)
