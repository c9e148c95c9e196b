"""Output of the jobs that computed an artifact, or tried to: `<artifact>/logs/<job id>.log`, written when a job ends.

Ray keeps the logs of jobs as long as its head lives.
"""

from __future__ import annotations

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store

MOST_BYTES = 4 << 20  # of one log: its end, where errors are


def write_log(store: Store, ref: ArtifactRef, job_id: str, text: str) -> None:
    """Write the output of a job; of more than `MOST_BYTES`, the last lines."""
    data = text.encode("utf-8", "replace")
    if len(data) > MOST_BYTES:
        _, _, end = data[-MOST_BYTES:].partition(b"\n")
        data = f"(the first {len(data) - len(end)} bytes are left out)\n".encode() + end
    store.put(f"{ref.path}/logs/{job_id}.log", data)


def read_logs(store: Store, artifacts: str) -> dict[str, str]:
    """Return the logs of artifacts whose path begins with `artifacts`, by the id of the job; older jobs first."""
    parts = {path: path.split("/") for path in store.list(artifacts)}
    paths = {of[4].removesuffix(".log"): path for path, of in parts.items() if len(of) == 5 and of[3] == "logs"}
    logs = {job_id: store.get(path) for job_id, path in sorted(paths.items(), key=lambda item: _number(item[0]))}
    return {job_id: data.decode("utf-8", "replace") for job_id, data in logs.items() if data is not None}


def _number(job_id: str) -> int:
    """Return the number of a job among those of its artifact."""
    digits = job_id.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
