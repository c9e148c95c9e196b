"""What Ray reserves, and the connection to Ray itself."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_core.config.training import Placement
from rlhf_core.errors import StageError

Bundle = dict[str, float]


def connect() -> None:
    """Connect this process to the Ray cluster whose job it is (RAY_ADDRESS says so), else to a new one of its own.

    A process that is connected already stays so. A cluster that merely happens to run on this machine is left alone.
    """
    if ray.is_initialized():
        return
    on_stop = signal.getsignal(signal.SIGTERM)
    if "RAY_ADDRESS" in os.environ:
        ray.init(address="auto")
    else:
        ray.init(address="local", include_dashboard=False)
    if threading.current_thread() is threading.main_thread():
        # Ray puts a handler in place that aborts the process: a job that is stopped must end its work in order.
        signal.signal(signal.SIGTERM, on_stop)


def worker_bundles(placement: Placement) -> list[Bundle]:
    """One bundle a worker."""
    bundle: Bundle = {"CPU": placement.cpus_per_worker}
    if placement.gpus_per_worker:
        bundle["GPU"] = placement.gpus_per_worker
    return [dict(bundle) for _ in range(placement.workers)]


def worker_threads(placement: Placement) -> int:
    """Threads that a worker computes with: as told, or as many as its reserved CPUs."""
    return placement.threads or max(1, math.ceil(placement.cpus_per_worker))


@contextmanager
def reserve(bundles: Sequence[Bundle], timeout: float = 600.0) -> Iterator[PlacementGroup]:
    """All of `bundles` or none, packed onto as few nodes as can be; given back at the end of the context.

    Raises StageError at once if the cluster is too small, and after `timeout` seconds if it stays busy; either says
    what was asked for and what there is.
    """
    asked = _total(bundles)
    cluster = ray.cluster_resources()
    if any(cluster.get(name, 0.0) < amount for name, amount in asked.items()):
        raise StageError(f"asked Ray for {_words(asked)}, the whole cluster has {_words(cluster)}; ask for less of it")
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=timeout)
        except GetTimeoutError as error:
            raise StageError(
                f"asked Ray for {_words(asked)} in {len(bundles)} bundles and waited {timeout:.0f} s; free are "
                f"{_words(ray.available_resources())} of {_words(cluster)}, too little or on too many nodes"
            ) from error
        yield group
    finally:
        remove_placement_group(group)


def _total(bundles: Sequence[Bundle]) -> Bundle:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _words(resources: Bundle) -> str:
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU") if name in resources)
        or "nothing"
    )
