"""The actors of a stage on Ray, on the cluster that this job belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.actors.placement import connect, halves, reserve, shared_bundles, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.config.training import Placement
from rlhf_core.contract import StageContext
from rlhf_core.rl.hybrid import LendsDevice
from rlhf_core.stages.cluster import EngineSpec

W = TypeVar("W")
L = TypeVar("L", bound=LendsDevice)


class RayCluster:
    """Implements stages.cluster.Cluster. Ranks and engines of a stage are reserved together, so that two stages never
    wait for each other's half."""

    @contextmanager
    def workers(self, placement: Placement, factory: Callable[..., W], /, *args: Any) -> Iterator[RayWorkerGroup[W]]:
        connect()
        workers = RayWorkerGroup(placement, factory, *args)
        try:
            yield workers
        finally:
            workers.shutdown()

    @contextmanager
    def engines(self, spec: EngineSpec, context: StageContext, /) -> Iterator[EngineGroup]:
        connect()
        with _engines(spec, spec.config, context) as engines:
            engines.wait_ready()
            yield engines

    @contextmanager
    def workers_and_engines(
        self, spec: EngineSpec, context: StageContext, placement: Placement, factory: Callable[..., L], /, *args: Any
    ) -> Iterator[tuple[RayWorkerGroup[L], EngineGroup]]:
        connect()
        start = _on_shared_devices if spec.sleeps else _on_own_devices
        with ExitStack() as stack:
            workers, engines = start(stack, spec, context, placement, partial(factory, *args))
            engines.wait_ready()
            yield workers, engines


def _on_own_devices(
    stack: ExitStack,
    spec: EngineSpec,
    context: StageContext,
    placement: Placement,
    worker: Callable[[], L],
) -> tuple[RayWorkerGroup[L], EngineGroup]:
    training, engine = worker_bundles(placement), engine_bundles(spec.config)
    group = stack.enter_context(reserve([*training, *engine]))
    engines = stack.enter_context(
        _engines(spec, spec.config, context, placement_group=group, first_bundle=len(training))
    )
    workers = RayWorkerGroup(placement, worker, placement_group=group)
    stack.callback(workers.shutdown)
    return workers, engines


def _on_shared_devices(
    stack: ExitStack,
    spec: EngineSpec,
    context: StageContext,
    placement: Placement,
    worker: Callable[[], L],
) -> tuple[RayWorkerGroup[L], EngineGroup]:
    """Worker i and engine i on one device. An engine takes its memory when it starts: the workers lend theirs first."""
    half, half_engine = halves(placement, spec.config)
    group = stack.enter_context(reserve(shared_bundles(placement, spec.config)))
    workers = RayWorkerGroup(half, worker, placement_group=group)
    stack.callback(workers.shutdown)
    workers.call(LendsDevice.offload)
    engines = stack.enter_context(_engines(spec, half_engine, context, placement_group=group))
    return workers, engines


def _engines(spec: EngineSpec, config: RolloutEngineConfig, context: StageContext, **where: Any) -> EngineGroup:
    return EngineGroup(
        spec.model.manifest.ref, context, config, dtype=spec.dtype, seed=context.seed, lora=spec.lora,
        sleeps=spec.sleeps, **where,
    )  # fmt: skip
