"""The ranks of a stage that trains: started, shut down whatever happens, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhf_core.actors.placement import connect
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.training import Placement
from rlhf_core.errors import StageError
from rlhf_core.training.group import WorkerGroup

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


class SavesModel(Protocol):
    """A worker whose model can be written to a folder."""

    def save(self, folder: Path) -> None: ...


def save(workers: WorkerGroup[SavesModel], folder: Path) -> None:
    """Rank 0 writes the model to `folder`. Raises StageError if that is not on this node, which publishes it."""
    workers.call(SavesModel.save, folder)
    if not folder.is_dir():
        raise StageError(f"rank 0 wrote {folder} on another node than the job's: give both one file system")
