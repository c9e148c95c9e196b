"""Leases: which process computes a key, and until when. They avoid duplicate work; put-if-absent protects the result.

Each reader compares the expiry with its own clock, so the clocks of all machines must agree within `CLOCK_SKEW`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

import psutil
from pydantic import AwareDatetime, ConfigDict

from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, StageError, StoreError, reason_of

LIFETIME = timedelta(seconds=40)
CLOCK_SKEW = timedelta(seconds=5)
_RENEWALS_PER_LIFETIME = 4
_POLL_SECONDS = 1.0


class Holder(Config):
    """A process, identified so that another one on the same machine notices its death at once."""

    id: str  # unique to each lease
    host: str
    machine: str  # the boot id of the machine and the process namespace that `pid` belongs to
    pid: int
    process_started: float


class LeaseRecord(Config):
    model_config = ConfigDict(extra="ignore")  # earlier releases kept the time of attempts in it

    holder: Holder
    expires_at: AwareDatetime
    renewals: int
    released: bool = False

    def is_free(self, now: datetime) -> bool:
        return self.released or now > self.expires_at + CLOCK_SKEW or _has_died(self.holder)


class Lease:
    """A lease held by this process. A thread renews it until it is released or another process has taken it.

    When it is lost, that thread calls `on_loss` once. The context manager releases it on exit.
    """

    def __init__(self, store: Store, path: str, record: LeaseRecord, tag: str, lifetime: timedelta):
        self._store = store
        self._path = path
        self._record = record
        self._tag = tag
        self._lifetime = lifetime
        self._ended = threading.Event()
        self._lost = ""
        self._on_loss: Callable[[], None] = lambda: None
        self._on_renewal: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._keep, name=f"lease {path}", daemon=True)

    def start(self, on_loss: Callable[[], None], on_renewal: Callable[[], None] = lambda: None) -> Self:
        """Start the heartbeat. on_renewal: called in its thread after each; a StoreError of it is printed."""
        self._on_loss, self._on_renewal = on_loss, on_renewal
        self._thread.start()
        return self

    @property
    def lost(self) -> str:
        """The reason for which the lease was lost; empty while it is held."""
        return self._lost

    @property
    def holder(self) -> Holder:
        return self._record.holder

    def check(self) -> None:
        """Raise StageError if the lease is lost."""
        if self._lost:
            raise StageError(self._lost)

    def release(self) -> None:
        """Allow another process to take the lease at once. No-op if it is lost."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        # Not deleted: an unconditional delete could remove the lease of a process that has taken over.
        try:
            while not self._lost and not self._record.released:
                self._write(self._record.model_copy(update={"released": True}))
        except StoreError as error:
            # Not raised: it must neither hide another error nor fail a job that has succeeded.
            print(f"the lease {self._path} could not be released and will expire: {error}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._ended.wait(self._lifetime.total_seconds() / _RENEWALS_PER_LIFETIME):
            now = datetime.now(UTC)
            renewed = {"expires_at": now + self._lifetime, "renewals": self._record.renewals + 1}
            try:
                self._write(self._record.model_copy(update=renewed))
                if not self._lost:
                    self._on_renewal()
            except StoreError as error:
                # Continue: no other process can take the lease either, and publishing will fail if the store is down.
                print(f"the lease {self._path} could not be renewed, retrying: {error}", flush=True)
            except Exception as error:  # a defect: without a heartbeat the job must not go on
                traceback.print_exc()
                self._lost = (
                    f"the heartbeat of the lease {self._path} failed ({reason_of(error)}): this job stops, and nothing "
                    "is published from it"
                )
            if self._lost:
                self._on_loss()
                return

    def _write(self, record: LeaseRecord) -> None:
        data = _encoded(record)
        with suppress(ConflictError):
            self._store.replace(self._path, data, self._tag)
        current = self._store.get_tagged(self._path)
        stored = None if current is None else _decoded(self._path, current[0])
        if current is not None and stored is not None and stored.holder == self._record.holder:
            # `record`, or an earlier write of ours whose response was lost.
            self._record, self._tag = stored, current[1]
        else:
            what = "was deleted" if stored is None else f"was taken by {_described(stored.holder)}"
            self._lost = f"the lease {self._path} {what}: this job stops, and nothing is published from it"


def lease_path(ref: ArtifactRef) -> str:
    return f"leases/{ref.stage}/{ref.key}.json"


def take_lease(store: Store, path: str, *, lifetime: timedelta = LIFETIME) -> Lease | Holder:
    """Return the lease at `path`, its heartbeat not started yet, or the process that holds it."""
    now = datetime.now(UTC)
    record = LeaseRecord(holder=_this_process(), expires_at=now + lifetime, renewals=0)
    data = _encoded(record)
    try:
        current = store.get_tagged(path)
        old = None if current is None else _decoded(path, current[0])
        if old is not None and not old.is_free(now):
            return old.holder
        store.put_if_unchanged(path, data, None if current is None else current[1])
    except ConflictError:
        pass
    written = store.get_tagged(path)
    if written is None:
        raise StoreError(f"{store.url}: {path} was deleted while it was taken: run again")
    if written[0] == data:
        return Lease(store, path, record, written[1], lifetime)
    return _decoded(path, written[0]).holder


def live_holder(store: Store, ref: ArtifactRef) -> Holder | None:
    """Return the process that computes `ref` now; None if none does."""
    return _live_holder_at(store, lease_path(ref))


def holder_of(store: Store, ref: ArtifactRef) -> str:
    """Describe the process that computes `ref` now; empty if none does."""
    return holder_at(store, lease_path(ref))


def holder_at(store: Store, path: str) -> str:
    """Describe the process that holds the lease at `path`; empty if none does."""
    holder = _live_holder_at(store, path)
    return "" if holder is None else _described(holder)


def _live_holder_at(store: Store, path: str) -> Holder | None:
    data = store.get(path)
    record = None if data is None else _decoded(path, data)
    return None if record is None or record.is_free(datetime.now(UTC)) else record.holder


def wait_for_lease(
    store: Store,
    ref: ArtifactRef,
    *,
    done: Callable[[], bool],
    waiting: Callable[[str], None],
    lifetime: timedelta = LIFETIME,
) -> Lease | None:
    """Wait for the lease of `ref` until its holder releases it or it expires; None once `done()`.

    waiting: called with a description of the holder, once per holder.
    """
    reported = ""
    while not done():
        taken = take_lease(store, lease_path(ref), lifetime=lifetime)
        if isinstance(taken, Lease):
            return taken
        if reported != taken.id:
            reported = taken.id
            waiting(_described(taken))
        time.sleep(_POLL_SECONDS)
    return None


def _encoded(record: LeaseRecord) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _decoded(path: str, data: bytes) -> LeaseRecord:
    return parsed(LeaseRecord, data, path, "a lease", "delete it in the store if no job of it is running")


def _described(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}"


def _this_process() -> Holder:
    process = psutil.Process()
    return Holder(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        pid=process.pid,
        process_started=process.create_time(),
    )


def _machine() -> str:
    """Return an id that two processes share only if each can see whether the other lives; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_died(holder: Holder) -> bool:
    if not holder.machine or holder.machine != _machine():
        return False
    try:
        return bool(abs(psutil.Process(holder.pid).create_time() - holder.process_started) > 1)
    except psutil.NoSuchProcess:
        return True
