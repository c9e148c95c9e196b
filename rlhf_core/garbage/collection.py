"""A collection: first what may go, then, in batches: announce it, look again at what is needed, delete the rest.

An artifact's manifest goes first, and a blob only when no document names it. So a collection that is killed leaves
artifacts that are whole or absent, and the next one continues.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from rlhf_core.artifacts.deletions import LIFETIME, Deletions
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import blob_path
from rlhf_core.artifacts.store import Entry, Store
from rlhf_core.artifacts.verification import BLOBS as BLOB_ROOT
from rlhf_core.garbage.contents import Folder
from rlhf_core.garbage.keep import BLOBS, CHECKPOINTS, Keep, kind_of
from rlhf_core.garbage.needs import Needs, NeedsReader, is_young

Progress = Callable[[int, int], None]  # objects deleted, and their bytes
_BATCH = 10_000
_PARALLEL_DELETIONS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class Amount:
    count: int = 0  # artifacts; of blobs, blobs
    num_bytes: int = 0

    def add(self, num_bytes: int, count: int = 1) -> None:
        self.count += count
        self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Objects to delete and to keep. A blob of several artifacts counts once, and for one that is kept."""

    needs: Needs
    folders: Sequence[ArtifactRef]  # whole, or what is left of a job in them
    blobs: Sequence[Entry]
    going: Mapping[str, Amount]  # by kind
    kept: Mapping[str, Amount]  # by the group of the reason


class GarbageCollection:
    def __init__(
        self,
        store: Store,
        keep: Keep,
        live_runs: Callable[[], Collection[str]] = frozenset,
        lifetime: timedelta = LIFETIME,
    ):
        """live_runs: returns the ids of runs that follow a job now. lifetime: of an announcement, at least."""
        self._store = store
        self._keep = keep
        self._reader = NeedsReader(store, keep, live_runs)
        self._lifetime = lifetime

    def plan(self) -> Plan:
        """Only reads. Raises IntegrityError for a document whose needs are not known, StoreError."""
        began = time.monotonic()
        needs = self._reader.read()
        # So that even a store that takes long to be read leaves time to delete.
        self._lifetime = max(self._lifetime, timedelta(seconds=6 * (time.monotonic() - began)))
        going: dict[str, Amount] = defaultdict(Amount)
        kept: dict[str, Amount] = defaultdict(Amount)
        owners: dict[bytes, Amount] = {}  # of each blob that a document names: what it counts for
        named: set[bytes] = set()  # by what is kept
        folders = []
        for folder in sorted(needs.folders.values(), key=lambda folder: self._goes(needs, folder)):  # kept ones first
            doomed = self._doomed(needs, folder)
            if self._goes(needs, folder):
                amount = going[_kind(folder)]
                amount.add(_size(doomed))
            else:
                amount = kept[needs.reasons[folder.ref].group]
                amount.add(_size(folder.entries) - _size(doomed))
                named |= folder.blobs
                if doomed:
                    going[CHECKPOINTS].add(_size(doomed))
            if doomed:
                folders.append(folder.ref)
            for blob in folder.blobs:
                owners.setdefault(blob, amount)
        blobs = []
        now = datetime.now(UTC)
        for entry, digest in self._stored_blobs():
            owner = owners.get(digest)
            if digest in named:
                owners[digest].add(entry.size, count=0)
            elif owner is None and is_young(entry.modified, self._keep[BLOBS], now):
                kept["--keep"].add(entry.size, count=0)
            else:
                blobs.append(entry)
                (going[BLOBS] if owner is None else owner).add(entry.size, count=int(owner is None))
        return Plan(needs, folders, blobs, going, kept)

    def delete(self, plan: Plan, progress: Progress = lambda count, num_bytes: None) -> Amount:
        """Delete what may go by `plan` and still may. Returns the deleted objects.

        Raises StoreError also if another collection is deleting; what was deleted until then stays so.
        """
        deleted = Amount()
        folders = [_Item(ref.path, partial(self._doomed_at, ref)) for ref in plan.folders]
        blobs = [_Item(entry.path, partial(_doomed_blob, entry)) for entry in plan.blobs]
        with Deletions(self._store, self._lifetime) as deletions:
            for items in (folders, blobs):  # blobs last, since documents of these folders name some
                self._sweep(deletions, items, deleted, progress)
        return deleted

    def _sweep(self, deletions: Deletions, items: Sequence[_Item], deleted: Amount, progress: Progress) -> None:
        stopped = threading.Event()

        def sweep(item: _Item, needs: Needs) -> tuple[_Item, list[Entry], bool]:
            """Return what was deleted, and whether the time of the announcement was over before all was."""
            done: list[Entry] = []
            for entry in item.doomed(needs):
                if stopped.is_set() or not deletions.may_delete():
                    return item, done, True
                self._store.delete(entry.path)
                done.append(entry)
            return item, done, False

        while items:
            batch, items = items[:_BATCH], items[_BATCH:]
            deletions.announce([item.path for item in batch])
            needs = self._reader.read()
            with ThreadPoolExecutor(_PARALLEL_DELETIONS) as pool:
                try:
                    for item, done, unfinished in pool.map(partial(sweep, needs=needs), batch):
                        deleted.add(_size(done), len(done))
                        progress(deleted.count, deleted.num_bytes)
                        items = [*items, item] if unfinished else items
                except BaseException:
                    stopped.set()  # the pool waits for all that it was given
                    raise

    def _goes(self, needs: Needs, folder: Folder) -> bool:
        """Return whether the whole folder may go: also a run's, if its stage did not end. A retry begins from zero."""
        if folder.manifest is not None:
            return folder.ref not in needs.reasons
        young = is_young(folder.newest, self._keep[CHECKPOINTS], datetime.now(UTC))
        return folder.ref not in needs.active and not young

    def _doomed(self, needs: Needs, folder: Folder) -> list[Entry]:
        """Return the objects of the folder that may go, the manifest first."""
        if self._goes(needs, folder):
            return folder.entries
        if folder.manifest is None or folder.ref in needs.active:
            return []
        leftovers, now = folder.leftovers, datetime.now(UTC)
        young = any(is_young(entry.modified, self._keep[BLOBS], now) for entry in leftovers)
        return [] if young else leftovers

    def _doomed_at(self, ref: ArtifactRef, needs: Needs) -> list[Entry]:
        return self._doomed(needs, needs.folders[ref]) if ref in needs.folders else []

    def _stored_blobs(self) -> Iterator[tuple[Entry, bytes]]:
        """Yield the blobs with their digests, in parts, so that memory is bounded. Leaves out other objects."""
        for digit in "0123456789abcdef":
            for entry in self._store.entries(f"{BLOB_ROOT}{digit}"):
                name = entry.path.rpartition("/")[2]
                if _SHA256.fullmatch(name) and entry.path == blob_path(name):
                    yield entry, bytes.fromhex(name)


class _Item(NamedTuple):
    path: str  # as it is announced
    doomed: Callable[[Needs], Sequence[Entry]]  # objects of it that may go, in order


def _doomed_blob(entry: Entry, needs: Needs) -> Sequence[Entry]:
    return [] if bytes.fromhex(entry.path.rpartition("/")[2]) in needs.blobs else [entry]


def _kind(folder: Folder) -> str:
    return CHECKPOINTS if folder.manifest is None else kind_of(folder.ref.stage, folder.manifest.kind)


def _size(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries)
