"""Who computes a key, until when. A lease saves work, it does not guard the result: that is put-if-absent's part.

Expiry is told by the clock of whoever looks, so clocks of the machines must agree within `CLOCK_SKEW`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

import psutil
from pydantic import ValidationError

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, IntegrityError, StageError, StoreError

LIFETIME = timedelta(seconds=40)
CLOCK_SKEW = timedelta(seconds=5)
_RENEWALS_PER_LIFETIME = 4
_POLL_SECONDS = 1.0


class Holder(Config):
    """A process, so that another one on the same machine sees at once that it has died."""

    id: str  # of the lease, never used again
    host: str
    machine: str  # this boot of this machine, and the process namespace that `pid` counts in
    pid: int
    process_started: float


class LeaseRecord(Config):
    holder: Holder
    expires_at: datetime
    renewals: int
    released: bool = False

    def is_free(self, now: datetime) -> bool:
        return self.released or now > self.expires_at + CLOCK_SKEW or _has_died(self.holder)


class Lease:
    """A lease that is held: renewed by a thread until it is released, or taken over by somebody else.

    `on_loss` is called once, in that thread, when it is lost. As a context manager it releases at the end.
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
        self._thread = threading.Thread(target=self._keep, name=f"lease {path}", daemon=True)

    def start(self, on_loss: Callable[[], None]) -> Self:
        """Start the heartbeat."""
        self._on_loss = on_loss
        self._thread.start()
        return self

    @property
    def lost(self) -> str:
        """Why the lease is lost, empty while it is held."""
        return self._lost

    def check(self) -> None:
        """Raises StageError if the lease is lost."""
        if self._lost:
            raise StageError(self._lost)

    def release(self) -> None:
        """Let the next one in at once. Harmless when it is lost."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        # Not deleted: a plain delete could hit the lease of somebody who has taken over.
        try:
            while not self._lost and not self._record.released:
                self._write(self._record.model_copy(update={"released": True}))
        except StoreError as error:
            # It must not hide what else went wrong, nor undo what went well.
            print(f"the lease {self._path} could not be given back, it runs out by itself: {error}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._ended.wait(self._lifetime.total_seconds() / _RENEWALS_PER_LIFETIME):
            renewed = {"expires_at": datetime.now(UTC) + self._lifetime, "renewals": self._record.renewals + 1}
            try:
                self._write(self._record.model_copy(update=renewed))
            except StoreError as error:
                # The work goes on: nobody else can take the lease either, and publishing will tell.
                print(f"the lease {self._path} could not be renewed and is tried again: {error}", flush=True)
            if self._lost:
                self._on_loss()
                return

    def _write(self, record: LeaseRecord) -> None:
        data = _encoded(record)
        with suppress(ConflictError):
            self._store.replace(self._path, data, self._tag)
        found = self._store.get_tagged(self._path)
        stored = None if found is None else _decoded(self._path, found[0])
        if found is not None and stored is not None and stored.holder == self._record.holder:
            # `record`, or an earlier write of ours whose answer was lost.
            self._record, self._tag = stored, found[1]
        else:
            what = "was deleted" if stored is None else f"was taken by {_described(stored.holder)}"
            self._lost = f"the lease {self._path} {what}: this job stops, and nothing is published from it"


def lease_path(ref: ArtifactRef) -> str:
    return f"leases/{ref.stage}/{ref.key}.json"


def take_lease(store: Store, ref: ArtifactRef, *, lifetime: timedelta = LIFETIME) -> Lease | Holder:
    """The lease of `ref`, its heartbeat not started yet; or who holds it."""
    path = lease_path(ref)
    record = LeaseRecord(holder=_this_process(), expires_at=datetime.now(UTC) + lifetime, renewals=0)
    data = _encoded(record)
    try:
        found = store.get_tagged(path)
        if found is None:
            store.put_if_absent(path, data)
        else:
            old = _decoded(path, found[0])
            if not old.is_free(datetime.now(UTC)):
                return old.holder
            store.replace(path, data, found[1])
    except ConflictError:
        pass
    written = store.get_tagged(path)
    if written is None:
        raise StoreError(f"{store.url}: {path} was deleted while it was taken: run again")
    if written[0] == data:
        return Lease(store, path, record, written[1], lifetime)
    return _decoded(path, written[0]).holder


def wait_for_lease(
    store: Store,
    ref: ArtifactRef,
    *,
    done: Callable[[], bool],
    waiting: Callable[[str], None],
    lifetime: timedelta = LIFETIME,
) -> Lease | None:
    """The lease of `ref`, as soon as whoever holds it lets go or expires; None once `done()`.

    waiting: told once who is waited for, in words.
    """
    told = ""
    while not done():
        taken = take_lease(store, ref, lifetime=lifetime)
        if isinstance(taken, Lease):
            return taken
        if told != taken.id:
            told = taken.id
            waiting(_described(taken))
        time.sleep(_POLL_SECONDS)
    return None


def _encoded(record: LeaseRecord) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _decoded(path: str, data: bytes) -> LeaseRecord:
    try:
        return LeaseRecord.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{path} is not a lease: {error}") from error


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
    """Equal for two processes only if each can see whether the other lives; empty where that cannot be told."""
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
