"""The ranks of a stage that trains: started, shut down whatever happens, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhf_core.actors.placement import connect
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.placement import Placement
from rlhf_core.contract import StageContext
from rlhf_core.errors import StageError
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.snapshots import SnapshotWorker

W = TypeVar("W")


class GroupFactory(Protocol):
    """How a stage gets its ranks: `ray_workers`, or an InlineGroup where one process is enough."""

    def __call__(self, placement: Placement, factory: Callable[..., W], /, *args: Any) -> WorkerGroup[W]: ...


def ray_workers(placement: Placement, factory: Callable[..., W], /, *args: Any) -> WorkerGroup[W]:
    """One Ray actor for each rank, on the cluster that this job belongs to."""
    connect()
    return RayWorkerGroup(placement, factory, *args)


@contextmanager
def running(group: WorkerGroup[W]) -> Iterator[WorkerGroup[W]]:
    """`group`, and its end at the end of the context."""
    try:
        yield group
    finally:
        group.shutdown()


def save(workers: WorkerGroup[SnapshotWorker], folder: Path, context: StageContext) -> None:
    """Rank 0 writes the trained model, and `folder`, in this job's working folder, then has it on this node.

    From another node it travels through the store: rank 0 uploads the files as blobs, this node downloads them. That
    costs one download of the model, to disk and never whole in memory; the upload is the one that publishing would do,
    which finds the blobs there. A folder that is not published itself, such as an adapter that is merged first, leaves
    its blobs unreferenced.
    """
    files = workers.call(SnapshotWorker.hand_over, folder)[0]
    if files:
        print(f"rank 0 is on another node: its {len(files)} files come through the store", flush=True)
        context.get_files(files, folder)
    if not folder.is_dir():
        raise StageError(f"rank 0 found the job's working folder, but {folder} is not on the job's node")
