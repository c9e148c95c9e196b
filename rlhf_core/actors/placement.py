"""Reservations of resources in Ray, and the connection to it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_core.actors import draining
from rlhf_core.actors.room import Bundle, autoscaling, in_words, require_possible, total
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.system.metering import METER
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.warm.client import python_command


def connect() -> None:
    """Connect this process to the Ray cluster of its job, by RAY_ADDRESS, or else to a new local one.

    A no-op if it is connected. Without RAY_ADDRESS, a cluster that runs on this machine is not used.
    """
    if ray.is_initialized():
        return
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    if "RAY_ADDRESS" in os.environ:
        ray.init(address="auto")
    else:
        ray.init(address="local", include_dashboard=False)
    if threading.current_thread() is threading.main_thread():
        # Ray installs a handler that aborts the process, but a stopped job must end its work in order.
        signal.signal(signal.SIGTERM, sigterm_handler)


def runtime_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's runtime_env of an actor with these variables, which starts as a warm Python if there is one."""
    environment: dict[str, Any] = {"env_vars": dict(variables)}
    if (command := python_command()) is not None:
        environment["py_executable"] = command
    return environment


def worker_bundles(placement: Placement) -> list[Bundle]:
    """Return one bundle per worker."""
    bundle: Bundle = {"CPU": placement.cpus_per_worker}
    if placement.gpus_per_worker:
        bundle["GPU"] = placement.gpus_per_worker
    return [dict(bundle) for _ in range(placement.workers)]


def shared_bundles(placement: Placement, rollout: RolloutEngineConfig) -> list[Bundle]:
    """Return one bundle for each engine and the workers on its devices: CPUs for all of them, the GPUs once."""
    workers = rollout.workers_per_engine
    bundle: Bundle = {"CPU": workers * placement.cpus_per_worker + rollout.cpus_per_engine}
    if placement.gpus_per_worker:
        bundle["GPU"] = workers * placement.gpus_per_worker
    return [dict(bundle) for _ in range(rollout.engines)]


@contextmanager
def reserve(bundles: Sequence[Bundle], every: float = 15.0) -> Iterator[PlacementGroup]:
    """Reserve all of `bundles` or none, packed onto as few nodes as possible; release them on exit.

    Until then the job is stopped, to be resumed elsewhere, once one of the nodes is drained.

    Waits for a busy cluster without limit, with a progress line every `every` seconds. Raises StageError at once for
    bundles that the cluster's current nodes could not hold if they were idle. Ray does not report whether nodes are
    added on demand, so the operator of an autoscaling cluster must set ALIGNMENT_AUTOSCALING=1 on its nodes: then
    every request waits, and it is a waiting request that makes Ray add nodes.
    """
    needed = total(bundles)
    if not autoscaling():
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        require_possible(bundles, nodes)
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        ready, progress, waited = group.ready(), ProgressReporter(), False
        with METER.waiting():
            while not ray.wait([ready], timeout=every)[0]:
                waited = True
                free, of_all = in_words(ray.available_resources(), needed), in_words(ray.cluster_resources(), needed)
                asked = in_words(needed, needed)
                progress.report(0, 0, f"waiting for Ray: asked for {asked}, free are {free} of {of_all}")
            ray.get(ready)
        if waited:
            progress.report(0, 0, f"Ray has reserved {in_words(needed, needed)}")
        with draining.watch(group):
            yield group
    finally:
        remove_placement_group(group)
