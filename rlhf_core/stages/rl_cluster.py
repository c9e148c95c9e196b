"""The training ranks and the engines of an RL stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.actors.placement import connect, reserve, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.rl import RLConfig
from rlhf_core.rl.publisher import PublishedEngines
from rlhf_core.rl.rollouts import Engines as SampledEngines
from rlhf_core.rl.worker import RLWorker
from rlhf_core.stages.contract import Input, StageContext
from rlhf_core.training.group import WorkerGroup


class Engines(SampledEngines, PublishedEngines, Protocol):
    """What the stage needs of the engines, one or many."""


class Cluster(Protocol):
    """Where the stage gets its training ranks and its engines: `ray_cluster`, or one process where that is enough."""

    def __call__(
        self, config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
    ) -> AbstractContextManager[tuple[WorkerGroup, Engines]]: ...


@contextmanager
def ray_cluster(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, /
) -> Iterator[tuple[RayWorkerGroup, EngineGroup]]:
    """Ray actors for both, reserved together so that two stages never wait for each other's half."""
    connect()
    training, engine = worker_bundles(config.placement), engine_bundles(config.rollout)
    reward_model = inputs["reward_model"].manifest.ref if "reward_model" in inputs else None
    with ExitStack() as stack:
        group = stack.enter_context(reserve([*training, *engine]))
        engines = EngineGroup(
            inputs["model"].manifest.ref, context, config.rollout, dtype=config.engine.dtype, seed=context.seed,
            lora=config.lora, placement_group=group, first_bundle=len(training),
        )  # fmt: skip
        stack.callback(engines.shutdown)
        workers = RayWorkerGroup(
            config.placement, RLWorker, config, context, inputs["model"].manifest.ref, reward_model,
            placement_group=group,
        )  # fmt: skip
        stack.callback(workers.shutdown)
        engines.wait_ready()
        yield workers, engines
