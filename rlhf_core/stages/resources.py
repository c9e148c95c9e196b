"""The record of what a job's processes use, sampled every few seconds and kept in the store beside its attempts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.resources import AttemptUses, ProcessUses, uses_path
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.system.resources import ProcessTree, Sample

if TYPE_CHECKING:
    from rlhf_core.stages.cluster import Cluster

_SECONDS = 10.0  # between two samples, at first
_JOIN_SECONDS = 2.0  # a stopped job has ten seconds for all of its end
_MOST_SAMPLES = 500  # of a process; then every second one is dropped, and the time between them doubles


class ResourceRecord:
    """Samples by process. The document stays small however long the job takes."""

    def __init__(self, started_at: datetime) -> None:
        self._started_at = started_at
        self._samples: dict[str, list[tuple[float, Sample]]] = {}
        self.interval = _SECONDS

    def add(self, seconds: float, samples: dict[str, Sample]) -> None:
        """Add samples that were taken so many seconds after the start."""
        for name, sample in samples.items():
            self._samples.setdefault(name, []).append((seconds, sample))
        if any(len(taken) > _MOST_SAMPLES for taken in self._samples.values()):
            self._samples = {name: taken[::2] for name, taken in self._samples.items()}
            self.interval *= 2

    def document(self) -> AttemptUses:
        return AttemptUses(
            started_at=self._started_at,
            processes={
                name: ProcessUses(
                    seconds=tuple(round(seconds, 1) for seconds, _ in taken),
                    cores=tuple(round(each.cores, 3) for _, each in taken),
                    host_bytes=tuple(each.host_bytes for _, each in taken),
                    gpu_share=tuple(None if each.gpu_share is None else round(each.gpu_share, 3) for _, each in taken),
                    gpu_bytes=tuple(each.gpu_bytes for _, each in taken),
                )
                for name, taken in self._samples.items()
            },
        )


@contextmanager
def recorded(
    store: Store, ref: ArtifactRef, started_at: datetime, attempt: str, clusters: Sequence[Cluster]
) -> Iterator[None]:
    """Record what this process and the actors of `clusters` use, in a thread, as long as the context lasts.

    attempt: its id. A store that fails is reported, since the job needs no record.
    """
    record, tree, began, ended = ResourceRecord(started_at), ProcessTree(), time.monotonic(), threading.Event()
    path = uses_path(ref, started_at, attempt)

    def look() -> None:
        samples = {"job": tree.sample()} | {name: each for c in clusters for name, each in c.resources().items()}
        record.add(time.monotonic() - began, samples)
        try:
            store.put(path, record.document().model_dump_json().encode())
        except StoreError as error:
            print(f"what this job uses cannot be stored for now: {error}", flush=True)

    def watch() -> None:
        while not ended.wait(record.interval):
            look()

    thread = threading.Thread(target=watch, name="resources", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=_JOIN_SECONDS)
