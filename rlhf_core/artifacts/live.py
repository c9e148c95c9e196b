"""Files of a stage that is still computed, for those who follow it: `<artifact>/live/<path>`.

A killed stage leaves them, and the next attempt replaces those that it writes again. The result has copies of its own,
so they are removed when it is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.tracking.protocol import METRICS_FILE

_SECONDS = 10.0  # between two copies of the metrics, at least
_SHARE = 0.01  # of the time that copying takes, at most: the file grows


class LiveFiles:
    """The live files of one artifact, by relative path. Only the holder of its lease writes and removes."""

    def __init__(self, store: Store, ref: ArtifactRef):
        self._store = store
        self._root = f"{ref.path}/live/"

    def put(self, path: str, data: bytes) -> None:
        """Write a file, in place of any of that path."""
        self._store.put(self._root + path, data)

    def get(self, path: str) -> bytes | None:
        return self._store.get(self._root + path)

    def paths(self, folder: str = "") -> list[str]:
        """Return the paths of all files that begin with `folder`, sorted."""
        return [path.removeprefix(self._root) for path in self._store.list(self._root + folder)]

    def clear(self) -> None:
        for path in self.paths():
            self._store.delete(self._root + path)


class LiveMetrics:
    """Copies the metrics of a stage to its live files every few seconds."""

    def __init__(self, live: LiveFiles, clock: Callable[[], float] = time.monotonic):
        self._live = live
        self._clock = clock
        self._next = clock()

    def copy(self, logged: Callable[[], bytes]) -> None:
        """Copy what has been logged, if it is time to. A store that fails is reported, since training needs no copy."""
        began = self._clock()
        if began < self._next:
            return
        try:
            self._live.put(METRICS_FILE, logged())
        except StoreError as error:
            print(f"the metrics cannot be followed for now: {error}", flush=True)
        ended = self._clock()
        self._next = ended + max(_SECONDS, (ended - began) / _SHARE)
