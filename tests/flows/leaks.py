"""Everything that leaves a run: what Ray, Prefect and the store show, and the command lines of its processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from rlhf_core.artifacts.store import Store
from tasks.ray_jobs import RayJobs

# Not its list of events, which fails once a worker was killed: their files are in the node's folder.
_DASHBOARD = (
    "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1", "/api/v0/jobs?detail=1", "/api/v0/workers?detail=1",
    "/api/v0/nodes?detail=1", "/api/v0/placement_groups?detail=1", "/api/v0/runtime_envs?detail=1",
    "/api/v0/objects?detail=1", "/logical/actors",
    "/nodes?view=summary", "/api/cluster_status", "/api/component_activities",
)  # fmt: skip
_PREFECT = (
    "flow_runs", "task_runs", "logs", "artifacts", "flows", "deployments", "variables", "block_documents",
    "work_pools", "events",
)  # fmt: skip


@contextmanager
def command_lines() -> Iterator[set[str]]:
    """Those of all processes that live meanwhile, some of them seen only by luck."""
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.3):
            for process in psutil.process_iter(["cmdline"]):
                seen.add(" ".join(process.info["cmdline"] or []))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def shown_by_ray(jobs: RayJobs, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of the Jobs API and the dashboard, and what the nodes' files hold."""
    client = jobs._client
    ids = [job.submission_id for job in client.list_jobs() if job.submission_id]
    per_job = [f"/api/jobs/{job}{more}" for job in ids for more in ("", "/logs")]
    for path in ("/api/jobs/", *per_job, *_DASHBOARD):
        answer = client._do_request("GET", path)
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        yield path, answer.content
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            yield str(file), file.read_bytes()


def shown_by_prefect(api: str) -> Iterator[tuple[str, bytes]]:
    with httpx.Client(base_url=api, timeout=30) as client:
        for kind in _PREFECT:
            offset, page = 0, b"?"
            while page not in (b"[]", b""):
                body = {"filter": {}, "limit": 50} if kind == "events" else {"limit": 200, "offset": offset}
                answer = client.post(f"/{kind}/filter", json=body)
                assert answer.status_code == 200, f"{kind}: {answer.text}"
                page = answer.content
                yield f"{kind} from {offset}", page
                offset += 200
                if kind == "events":
                    following = answer.json().get("next_page")
                    while following:
                        answer = client.get(following)
                        yield kind, answer.content
                        following = answer.json().get("next_page")
                    break


def kept_in(store: Store) -> Iterator[tuple[str, bytes]]:
    for path in store.list(""):
        yield path, store.get(path) or b""
