"""Announcements of a garbage collection: the artifacts and blobs that it deletes at the moment.

A job that comes to need one writes that down, then calls `wait_for_deletions`, then looks whether it is there. A
collection announces what it is about to delete, then reads again what is needed, then deletes. So a need is
either read by the collection, or its owner sees the announcement and waits (decision 63).

Deletions are started in the first third of an announcement's time. The rest covers requests that take long, and clocks,
which must agree within `CLOCK_SKEW`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from pydantic import AwareDatetime

from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.leases import CLOCK_SKEW
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, StoreError

DELETING = "gc/deleting.json"
LIFETIME = timedelta(minutes=15)
_POLL_SECONDS = 0.5


class Announcement(Config):
    collection: str  # its random id
    until: AwareDatetime
    paths: tuple[str, ...]  # of blobs, and of artifacts' folders

    def is_over(self, now: datetime) -> bool:
        return not self.paths or now > self.until + CLOCK_SKEW


def wait_for_deletions(
    store: Store, paths: Iterable[str], waiting: Callable[[str], None] = lambda text: print(text, flush=True)
) -> None:
    """Return once no collection is deleting one of `paths`. What needs them must have been written before.

    waiting: called with a sentence if it has to wait: for seconds, or LIFETIME at most if the collection was killed.
    """
    wanted: frozenset[str] | None = None
    told = False
    while (stored := store.get(DELETING)) is not None:
        announced = _parsed(stored)
        wanted = frozenset(paths) if wanted is None else wanted
        if announced.is_over(datetime.now(UTC)) or wanted.isdisjoint(announced.paths):
            return
        if not told:
            latest = f"until {announced.until:%H:%M} UTC at most"
            waiting(f"waiting for `alignment gc`, which deletes something needed here ({latest})")
            told = True
        time.sleep(_POLL_SECONDS)


class Deletions:
    """The announcements of one collection; two never delete at the same time.

    As a context manager it withdraws the last one on exit.
    """

    def __init__(self, store: Store, lifetime: timedelta = LIFETIME):
        self._store = store
        self._lifetime = lifetime
        self._id = uuid.uuid4().hex
        self._until = datetime.min.replace(tzinfo=UTC)

    def announce(self, paths: Collection[str]) -> None:
        """Replace the announcement before. Raises StoreError if another collection is deleting."""
        stored = self._store.get_tagged(DELETING)
        before = None if stored is None else _parsed(stored[0])
        now = datetime.now(UTC)
        if before is not None and before.collection != self._id and not before.is_over(now):
            raise StoreError(
                f"another `alignment gc` is deleting, or was killed: try again after {before.until:%H:%M} UTC"
            )
        new = Announcement(collection=self._id, until=now + self._lifetime, paths=tuple(paths))
        data = new.model_dump_json().encode()
        try:
            self._store.put_if_unchanged(DELETING, data, None if stored is None else stored[1])
        except ConflictError as error:
            if self._store.get(DELETING) != data:  # else it is our own write, whose response was lost
                raise StoreError("another `alignment gc` has started: let it finish") from error
        self._until = new.until

    def may_delete(self) -> bool:
        """Return whether a deletion may still be started under the last announcement."""
        return datetime.now(UTC) < self._until - self._lifetime * 2 / 3

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._until.year > 1 and not isinstance(error, StoreError):  # the store may be gone: it expires
            self.announce(())


def _parsed(data: bytes) -> Announcement:
    return parsed(
        Announcement, data, DELETING, "an announcement of deletions", "delete it if no `alignment gc` is running"
    )
