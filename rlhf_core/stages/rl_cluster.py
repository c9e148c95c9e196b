"""The training ranks and the engines of an RL stage, and the ranks of models that are placed apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.actors.placement import Bundle, connect, halves, reserve, shared_bundles, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.placement import Placement
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.rl.roles import Role, placed_apart, roles
from rlhf_core.rl.scoring import FrozenWorker
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.engines import SleepingEngines
from rlhf_core.training.group import WorkerGroup

Frozen = Mapping[str, WorkerGroup[FrozenWorker]]  # by role, each with a placement of its own


class Cluster(Protocol):
    """Where the stage gets its training ranks, its engines, and the ranks of models that are placed apart:
    `ray_cluster`, or one process where that is enough."""

    def __call__(
        self, config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
    ) -> AbstractContextManager[tuple[WorkerGroup[RLWorker], SleepingEngines, Frozen]]: ...


@contextmanager
def ray_cluster(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
) -> Iterator[tuple[RayWorkerGroup[RLWorker], EngineGroup, Frozen]]:
    """Ray actors for all, reserved together so that two stages never wait for each other's half."""
    connect()
    start = _on_shared_devices if config.hybrid else _on_own_devices
    with ExitStack() as stack:
        workers, engines, frozen = start(stack, config, inputs, context)
        engines.wait_ready()
        yield workers, engines, frozen


def _on_own_devices(
    stack: ExitStack, config: RLConfig, inputs: Mapping[str, Input], context: StageContext
) -> tuple[RayWorkerGroup[RLWorker], EngineGroup, Frozen]:
    models = roles(config, inputs)
    training, engine = worker_bundles(config.placement), engine_bundles(config.rollout)
    group = stack.enter_context(reserve([*training, *engine, *_bundles_apart(models)]))
    engines = _engines(config, config.rollout, inputs, context, group, first_bundle=len(training))
    stack.callback(engines.shutdown)
    workers = _workers(config, config.placement, models, context, group)
    stack.callback(workers.shutdown)
    return workers, engines, _frozen(stack, config, models, context, group, first_bundle=len(training) + len(engine))


def _on_shared_devices(
    stack: ExitStack, config: RLConfig, inputs: Mapping[str, Input], context: StageContext
) -> tuple[RayWorkerGroup[RLWorker], EngineGroup, Frozen]:
    """Worker i and engine i on one device. An engine takes its memory when it starts: the workers lend theirs first."""
    models = roles(config, inputs)
    placement, rollout = halves(config.placement, config.rollout)
    shared = shared_bundles(config.placement, config.rollout)
    group = stack.enter_context(reserve([*shared, *_bundles_apart(models)]))
    workers = _workers(config, placement, models, context, group)
    stack.callback(workers.shutdown)
    workers.call(RLWorker.offload)
    engines = _engines(config, rollout, inputs, context, group, first_bundle=0)
    stack.callback(engines.shutdown)
    return workers, engines, _frozen(stack, config, models, context, group, first_bundle=len(shared))


def _workers(
    config: RLConfig, placement: Placement, models: Sequence[Role], context: StageContext, group: Any
) -> RayWorkerGroup[RLWorker]:
    own = [role for role in models if role.placement is None]
    return RayWorkerGroup(placement, RLWorker, config, context, own, placement_group=group)


def _bundles_apart(models: Sequence[Role]) -> list[Bundle]:
    return [bundle for placement in placed_apart(models).values() for bundle in worker_bundles(placement)]


def _frozen(
    stack: ExitStack, config: RLConfig, models: Sequence[Role], context: StageContext, group: Any, first_bundle: int
) -> Frozen:
    """The ranks of the models that are placed apart, in the bundles of `_bundles_apart`."""
    started: dict[str, RayWorkerGroup[FrozenWorker]] = {}
    for role, placement in placed_apart(models).items():
        workers = RayWorkerGroup(
            placement, FrozenWorker, config, context, role, placement_group=group, first_bundle=first_bundle
        )
        stack.callback(workers.shutdown)
        started[role.name] = workers
        first_bundle += placement.workers
    return started


def _engines(
    config: RLConfig, rollout: RolloutEngineConfig, inputs: Mapping[str, Input], context: StageContext,
    group: Any, first_bundle: int,
) -> EngineGroup:  # fmt: skip
    return EngineGroup(
        inputs["model"].manifest.ref, context, rollout, dtype=config.engine.dtype, seed=context.seed, lora=config.lora,
        sleeps=config.hybrid, placement_group=group, first_bundle=first_bundle,
    )  # fmt: skip
