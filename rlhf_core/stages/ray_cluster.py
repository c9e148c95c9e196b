"""A stage's actors on Ray, on the cluster of this job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.actors.placement import connect, reserve, shared_bundles, worker_bundles
from rlhf_core.actors.resources import ActorResources
from rlhf_core.actors.room import Bundle
from rlhf_core.actors.stacks import stacks_of_actors
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.contract import StageContext
from rlhf_core.rl.hybrid import LendsDevice
from rlhf_core.stages.cluster import EngineSpec, RankSpec
from rlhf_core.system.resources import Sample

W = TypeVar("W")
L = TypeVar("L", bound=LendsDevice)


class RayCluster:
    """Implements stages.cluster.Cluster. All actors of a stage are reserved together, so that two stages never wait for
    each other's half."""

    def __init__(self) -> None:
        self._resources = ActorResources()

    def stacks(self) -> dict[str, str]:
        return stacks_of_actors()

    def resources(self) -> dict[str, Sample]:
        return self._resources.samples()

    @contextmanager
    def workers(
        self, placement: Placement, engine: EngineConfig, factory: Callable[..., W], /, *args: Any
    ) -> Iterator[RayWorkerGroup[W]]:
        connect()
        workers = RayWorkerGroup(
            placement, factory, *args, sequence=engine.sequence_parallel, tensor=engine.tensor_parallel
        )
        try:
            yield workers
        finally:
            workers.shutdown()

    @contextmanager
    def engines(self, spec: EngineSpec, context: StageContext, /) -> Iterator[EngineGroup]:
        connect()
        with EngineGroup(spec.model.manifest.ref, context, spec.settings) as engines:
            engines.wait_ready()
            yield engines

    @contextmanager
    def workers_and_engines(
        self, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, apart: Mapping[str, RankSpec[W]], /
    ) -> Iterator[tuple[RayWorkerGroup[L], EngineGroup, Mapping[str, RayWorkerGroup[W]]]]:
        connect()
        start = _on_shared_devices if spec.settings.sleeps else _on_own_devices
        bundles = [bundle for other in apart.values() for bundle in worker_bundles(other.placement)]
        with ExitStack() as stack:
            workers, engines, group, taken = start(stack, ranks, spec, context, bundles)
            others = {}
            for name, other in apart.items():
                others[name] = _workers(stack, other, group, first_bundle=taken)
                taken += other.placement.workers
            engines.wait_ready()
            yield workers, engines, others


Started = tuple[RayWorkerGroup[L], EngineGroup, Any, int]  # with the placement group, and how many bundles both have


def _on_own_devices(
    stack: ExitStack, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, others: list[Bundle]
) -> Started[L]:
    training, engine = worker_bundles(ranks.placement), engine_bundles(spec.settings.config)
    group = stack.enter_context(reserve([*training, *engine, *others]))
    engines = EngineGroup(
        spec.model.manifest.ref, context, spec.settings, placement_group=group, first_bundle=len(training)
    )
    stack.enter_context(engines)
    return _workers(stack, ranks, group), engines, group, len(training) + len(engine)


def _on_shared_devices(
    stack: ExitStack, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, others: list[Bundle]
) -> Started[L]:
    """Start each engine on the devices of as many workers as it is spread over.

    An engine allocates its memory at its start: the workers free theirs first.
    """
    spread = spec.settings.config.workers_per_engine
    shared = shared_bundles(ranks.placement, spec.settings.config)
    group = stack.enter_context(reserve([*shared, *others]))
    workers = _workers(stack, ranks, group, workers_per_bundle=spread)
    workers.call(LendsDevice.offload)
    of_workers = workers.gpus()
    gpus = [[*chain(*of_workers[first : first + spread])] for first in range(0, workers.size, spread)]
    engines = EngineGroup(spec.model.manifest.ref, context, spec.settings, placement_group=group, gpus=gpus)
    return workers, stack.enter_context(engines), group, len(shared)


def _workers(
    stack: ExitStack, ranks: RankSpec[W], group: Any, *, first_bundle: int = 0, workers_per_bundle: int = 1
) -> RayWorkerGroup[W]:
    workers = RayWorkerGroup(
        ranks.placement, ranks.factory, placement_group=group, first_bundle=first_bundle,
        workers_per_bundle=workers_per_bundle, sequence=ranks.engine.sequence_parallel,
        tensor=ranks.engine.tensor_parallel,
    )  # fmt: skip
    stack.callback(workers.shutdown)
    return workers
