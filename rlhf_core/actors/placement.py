"""What Ray reserves, and the connection to Ray itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_core.actors.room import Bundle, autoscaling, in_words, require_possible, total
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.warm.client import python_command


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


def runtime_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Ray's runtime_env of an actor with these environment variables, which starts warm where this node can."""
    environment: dict[str, Any] = {"env_vars": dict(variables)}
    if (command := python_command()) is not None:
        environment["py_executable"] = command
    return environment


def worker_bundles(placement: Placement) -> list[Bundle]:
    """One bundle a worker."""
    bundle: Bundle = {"CPU": placement.cpus_per_worker}
    if placement.gpus_per_worker:
        bundle["GPU"] = placement.gpus_per_worker
    return [dict(bundle) for _ in range(placement.workers)]


def shared_bundles(placement: Placement, rollout: RolloutEngineConfig) -> list[Bundle]:
    """One bundle for each worker and the engine that takes turns with it: CPUs for both, the GPU once."""
    bundle: Bundle = {"CPU": placement.cpus_per_worker + rollout.cpus_per_engine}
    if placement.gpus_per_worker:
        bundle["GPU"] = placement.gpus_per_worker
    return [dict(bundle) for _ in range(placement.workers)]


def halves(placement: Placement, rollout: RolloutEngineConfig) -> tuple[Placement, RolloutEngineConfig]:
    """What each asks of a shared bundle: half its GPU, so that Ray gives both the same one."""
    return (
        placement.model_copy(update={"gpus_per_worker": placement.gpus_per_worker / 2}),
        rollout.model_copy(update={"gpus_per_engine": rollout.gpus_per_engine / 2}),
    )


@contextmanager
def reserve(bundles: Sequence[Bundle], every: float = 15.0) -> Iterator[PlacementGroup]:
    """All of `bundles` or none, packed onto as few nodes as can be; given back at the end of the context.

    A busy cluster is waited for as long as it takes; each `every` seconds a progress line says for what.
    Raises StageError at once for what the cluster's nodes, as they are now, could not give if they were idle. Ray does
    not tell whether more nodes would come on demand, so the operator of a cluster that grows must say so: with
    ALIGNMENT_AUTOSCALING=1 on its nodes everything is waited for, and it is the waiting that makes nodes come.
    """
    asked = total(bundles)
    if not autoscaling():
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        require_possible(bundles, nodes)
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        ready, progress, waited = group.ready(), ProgressReporter(), False
        while not ray.wait([ready], timeout=every)[0]:
            waited = True
            free, of_all = in_words(ray.available_resources(), asked), in_words(ray.cluster_resources(), asked)
            progress.report(0, 0, f"waiting for Ray: asked for {in_words(asked, asked)}, free are {free} of {of_all}")
        ray.get(ready)
        if waited:
            progress.report(0, 0, f"Ray has reserved {in_words(asked, asked)}")
        yield group
    finally:
        remove_placement_group(group)
