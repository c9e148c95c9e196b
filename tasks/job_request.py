"""Request of a job: the stage's key, the store, and the attempt, from which its id is derived.

So a restarted orchestrator finds the job that its predecessor started.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

_JOB_ID = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{8}-a\d+")


@dataclass(frozen=True, slots=True)
class JobRequest:
    store: str  # that the result goes to: a URL
    stage: str
    key: str  # of the stage's result, 64 hex digits
    entrypoint: str  # a shell command
    environment: Mapping[str, str]  # that the job gets; it may be secret, see rlhf_core.actors.forwarding
    metadata: Mapping[str, str]
    cpus: float  # reserved for the entrypoint's own process; its workers reserve theirs
    memory: int = 0  # bytes, likewise

    @property
    def id_prefix(self) -> str:
        """Prefix of the ids of jobs with this result in this store; one URL may be two buckets at two S3 servers."""
        place = f"{self.store} {self.environment.get('AWS_ENDPOINT_URL', '')}"
        return f"{artifact_prefix(self.stage, self.key)}{hashlib.sha256(place.encode()).hexdigest()[:8]}-a"


def artifact_prefix(stage: str, key: str) -> str:
    """Return what the ids of all jobs begin with that compute an artifact, in whichever store."""
    return f"{stage}-{key[:16]}-"


def id_prefix(job_id: str) -> str:
    """Return `JobRequest.id_prefix` of the job's request: all but the number of its attempt."""
    return job_id[: job_id.rindex("-a") + 2]


def is_job_id(submission_id: str) -> bool:
    """Return whether a job of the cluster is one of ours: of any stage and store."""
    return _JOB_ID.fullmatch(submission_id) is not None
