"""The training ranks and the engines of an RL stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.actors.placement import connect, halves, reserve, shared_bundles, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.config.training import Placement
from rlhf_core.contract import Input, StageContext
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.engines import SleepingEngines
from rlhf_core.training.group import WorkerGroup


class Cluster(Protocol):
    """Where the stage gets its training ranks and its engines: `ray_cluster`, or one process where that is enough."""

    def __call__(
        self, config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
    ) -> AbstractContextManager[tuple[WorkerGroup[RLWorker], SleepingEngines]]: ...


@contextmanager
def ray_cluster(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
) -> Iterator[tuple[RayWorkerGroup[RLWorker], EngineGroup]]:
    """Ray actors for both, reserved together so that two stages never wait for each other's half."""
    connect()
    with _hybrid_cluster(config, inputs, context) if config.hybrid else _own_devices(config, inputs, context) as both:
        yield both


@contextmanager
def _own_devices(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext
) -> Iterator[tuple[RayWorkerGroup[RLWorker], EngineGroup]]:
    training, engine = worker_bundles(config.placement), engine_bundles(config.rollout)
    with ExitStack() as stack:
        group = stack.enter_context(reserve([*training, *engine]))
        engines = _engines(config, config.rollout, inputs, context, group, first_bundle=len(training))
        stack.callback(engines.shutdown)
        workers = _workers(config, config.placement, inputs, context, group)
        stack.callback(workers.shutdown)
        engines.wait_ready()
        yield workers, engines


@contextmanager
def _hybrid_cluster(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext
) -> Iterator[tuple[RayWorkerGroup[RLWorker], EngineGroup]]:
    """Worker i and engine i on one device. An engine takes its memory when it starts: the workers lend theirs first."""
    placement, rollout = halves(config.placement, config.rollout)
    with ExitStack() as stack:
        group = stack.enter_context(reserve(shared_bundles(config.placement, config.rollout)))
        workers = _workers(config, placement, inputs, context, group)
        stack.callback(workers.shutdown)
        workers.call(RLWorker.offload)
        engines = _engines(config, rollout, inputs, context, group, first_bundle=0)
        stack.callback(engines.shutdown)
        engines.wait_ready()
        yield workers, engines


def _workers(
    config: RLConfig, placement: Placement, inputs: Mapping[str, Input], context: StageContext, group: Any
) -> RayWorkerGroup[RLWorker]:
    return RayWorkerGroup(placement, RLWorker, config, context, roles(config, inputs), placement_group=group)


def _engines(
    config: RLConfig, rollout: RolloutEngineConfig, inputs: Mapping[str, Input], context: StageContext,
    group: Any, first_bundle: int,
) -> EngineGroup:  # fmt: skip
    return EngineGroup(
        inputs["model"].manifest.ref, context, rollout, dtype=config.engine.dtype, seed=context.seed, lora=config.lora,
        sleeps=config.hybrid, placement_group=group, first_bundle=first_bundle,
    )  # fmt: skip
