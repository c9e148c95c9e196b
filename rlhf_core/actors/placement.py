"""What Ray reserves, and the connection to Ray itself."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlhf_core.config.placement import Placement
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.errors import StageError
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.warm.client import python_command

Bundle = dict[str, float]

_RESOLUTION = 1e-4  # Ray counts in these


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
    asked = _total(bundles)
    if not autoscaling():
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        require_possible(bundles, nodes)
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        ready, progress, waited = group.ready(), ProgressReporter(), False
        while not ray.wait([ready], timeout=every)[0]:
            waited = True
            free, total = _words(ray.available_resources(), asked), _words(ray.cluster_resources(), asked)
            progress.report(0, 0, f"waiting for Ray: asked for {_words(asked, asked)}, free are {free} of {total}")
        ray.get(ready)
        if waited:
            progress.report(0, 0, f"Ray has reserved {_words(asked, asked)}")
        yield group
    finally:
        remove_placement_group(group)


def autoscaling() -> bool:
    """Whether nodes come on demand, which Ray does not tell."""
    return os.environ.get("ALIGNMENT_AUTOSCALING") == "1"


def require_possible(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> None:
    """Raises StageError if idle `nodes` lack room for all bundles together, or for all those of one kind."""
    asked, available = _total(bundles), _total(nodes)
    if any(available.get(name, 0.0) + _RESOLUTION < amount for name, amount in asked.items()):
        raise StageError(
            f"asked Ray for {_words(asked, asked)}, the whole cluster has {_words(available, asked)}; "
            "ask for less of it"
        )
    for bundle in bundles:
        wanted, room = bundles.count(bundle), sum(_how_often(bundle, node) for node in nodes)
        if room < wanted:
            there_are = "; ".join(_words(node, bundle) for node in nodes)
            raise StageError(
                f"asked Ray for {wanted} times {_words(bundle, bundle)}, each on one node, but the nodes have room for "
                f"{room} ({there_are}); ask for less, or for smaller parts"
            )


def _how_often(bundle: Bundle, node: Bundle) -> int:
    """How many of such bundles an idle node holds."""
    return min(math.floor(node.get(name, 0.0) / amount + _RESOLUTION) for name, amount in bundle.items() if amount > 0)


def _total(bundles: Sequence[Bundle]) -> Bundle:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _words(resources: Bundle, names: Iterable[str]) -> str:
    return " and ".join(_amount(name, resources.get(name, 0.0)) for name in names)


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB of memory" if name == "memory" else f"{amount:g} {name}s"
