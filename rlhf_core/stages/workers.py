"""The ranks of a stage that trains: started, shut down whatever happens, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rlhf_core.actors.placement import connect
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.training import Placement
from rlhf_core.training.group import WorkerGroup


class GroupFactory(Protocol):
    """How a stage gets its ranks: `ray_workers`, or an InlineGroup where one process is enough."""

    def __call__(self, placement: Placement, factory: Callable[..., Any], /, *args: Any) -> WorkerGroup: ...


def ray_workers(placement: Placement, factory: Callable[..., Any], /, *args: Any) -> WorkerGroup:
    """One Ray actor for each rank, on the cluster that this job belongs to."""
    connect()
    return RayWorkerGroup(placement, factory, *args)


@contextmanager
def running(group: WorkerGroup) -> Iterator[WorkerGroup]:
    """`group`, and its end at the end of the context."""
    try:
        yield group
    finally:
        group.shutdown()


def reserved_devices(placement: Placement) -> float:
    """GPUs that the placement reserves; where it reserves none, CPUs."""
    return placement.workers * (placement.gpus_per_worker or placement.cpus_per_worker)
