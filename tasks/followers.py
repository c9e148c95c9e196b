"""Followers of a job: a cancelled run stops the job only if no other run follows it.

`followers/<job id without its attempt>.json` has the ids of the runs, each with its expiry, and the
attempt that the last cancelled one stops. Every change is a compare-and-swap, so that a run that starts to follow while
another is cancelled either is seen by it, or sees that the job is being stopped and submits another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from pydantic import Field, ValidationError

from rlhf_core.artifacts.leases import CLOCK_SKEW
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, IntegrityError, StoreError
from tasks.job_request import artifact_prefix

LIFETIME = timedelta(seconds=60)
_RENEWALS_PER_LIFETIME = 4


class FollowersRecord(Config):
    expires_at: Mapping[str, datetime] = Field(default_factory=dict)  # by id of the run
    stopped_job: str = ""  # a run that starts to follow does not attach to it


class Follower:
    """One run's entry among the followers of the jobs that compute one result.

    As a context manager it is renewed by a thread. It outlives the block: only `leave` ends it, or, after
    the death of the run's process, its expiry.
    """

    def __init__(self, store: Store, id_prefix: str, run_id: str, lifetime: timedelta = LIFETIME):
        self._store = store
        self._path = f"followers/{id_prefix.removesuffix('-a')}.json"
        self._run_id = run_id
        self._lifetime = lifetime
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"follower {self._path}", daemon=True)

    def join(self) -> str:
        """Register before attaching to a job. Returns the job that must not be attached to; empty if there is none.

        Raises StoreError.
        """
        return self._update(self._with_me).stopped_job

    def leave(self) -> None:
        """Remove the entry, when the job has ended."""
        self._end_renewals()
        self._update(self._without_me)

    def leave_and_stop(self, job_id: str) -> bool:
        """Remove the entry on cancellation. Returns whether the caller must stop `job_id`: no other run follows it."""

        def change(record: FollowersRecord) -> FollowersRecord:
            if self._run_id not in record.expires_at:
                return record
            left = self._without_me(record)
            return left if left.expires_at else left.model_copy(update={"stopped_job": job_id})

        self._end_renewals()
        record = self._update(change)
        return record.stopped_job == job_id and not record.expires_at

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_renewals()

    def _end_renewals(self) -> None:
        """Stop renewals before a leave, which a concurrent renewal would undo."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(self._lifetime.total_seconds() / _RENEWALS_PER_LIFETIME):
            try:
                self._update(self._with_me)
            except StoreError as error:
                # Continue: without the store no other run can stop the job either.
                print(f"{self._path} could not be renewed, retrying: {error}", flush=True)

    def _with_me(self, record: FollowersRecord) -> FollowersRecord:
        until = datetime.now(UTC) + self._lifetime
        return record.model_copy(update={"expires_at": {**self._others(record), self._run_id: until}})

    def _without_me(self, record: FollowersRecord) -> FollowersRecord:
        return record.model_copy(update={"expires_at": self._others(record)})

    def _others(self, record: FollowersRecord) -> dict[str, datetime]:
        now = datetime.now(UTC)
        return {
            run_id: until
            for run_id, until in record.expires_at.items()
            if run_id != self._run_id and now <= until + CLOCK_SKEW
        }

    def _update(self, change: Callable[[FollowersRecord], FollowersRecord]) -> FollowersRecord:
        while True:
            current = self._store.get_tagged(self._path)
            old = FollowersRecord() if current is None else _decoded(self._path, current[0])
            new = change(old)
            if new == old:
                return new
            data = new.model_dump_json(indent=1).encode()
            try:
                self._store.put_if_unchanged(self._path, data, None if current is None else current[1])
            except ConflictError:
                continue  # another run was faster, or the response to our own write was lost
            return new


def follows(store: Store, run_id: str, refs: Collection[ArtifactRef]) -> bool:
    """Return whether a run follows the job of one of these artifacts now."""
    now = datetime.now(UTC)
    paths = (path for ref in refs for path in store.list(f"followers/{artifact_prefix(ref.stage, ref.key)}"))
    records = (_decoded(path, data) for path in paths if (data := store.get(path)) is not None)
    return any(run_id in each.expires_at and now <= each.expires_at[run_id] + CLOCK_SKEW for each in records)


def live_runs(store: Store) -> set[str]:
    """Return the ids of the runs that follow a job now."""
    now = datetime.now(UTC)
    records = [_decoded(path, data) for path in store.list("followers/") if (data := store.get(path)) is not None]
    return {run_id for record in records for run_id, until in record.expires_at.items() if now <= until + CLOCK_SKEW}


def _decoded(path: str, data: bytes) -> FollowersRecord:
    try:
        return FollowersRecord.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{path} does not list the followers of a job: {error}") from error
