"""A stage's actors without Ray: one rank in this process, within reach of a debugger, and one engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.contract import StageContext
from rlhf_core.processes.child_output import kept_output
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rl.hybrid import LendsDevice
from rlhf_core.rollout.child_engine import ChildEngine, engine_in_child
from rlhf_core.rollout.engines import OneEngine
from rlhf_core.stages.cluster import EngineSpec, RankSpec
from rlhf_core.system.resources import Sample
from rlhf_core.system.threads import use_threads
from rlhf_core.training.group import InlineGroup

W = TypeVar("W")
L = TypeVar("L", bound=LendsDevice)

OpenEngine = Callable[[EngineSpec, StageContext], AbstractContextManager[OneEngine]]


@contextmanager
def engine_in(process: ChildProcess, spec: EngineSpec, context: StageContext) -> Iterator[OneEngine]:
    """Start an engine in `process`, for as long as the context lasts."""
    engine = ChildEngine(process, spec.model.folder, spec.settings)
    yield engine
    engine.shutdown()


@contextmanager
def engine_beside(spec: EngineSpec, context: StageContext) -> Iterator[OneEngine]:
    """Start an engine in a process of its own, which ends with this context. vLLM's output is printed after errors."""
    with ExitStack() as stack:
        output = stack.enter_context(kept_output()) if spec.settings.config.type == "vllm" else None
        yield stack.enter_context(engine_in_child(spec.model.folder, spec.settings, _devices(spec), output))


class InProcessCluster:
    """Implements stages.cluster.Cluster with one rank and one engine, whatever the recipe's placement is."""

    def __init__(self, open_engine: OpenEngine = engine_beside) -> None:
        self._open_engine = open_engine

    def stacks(self) -> dict[str, str]:
        return {}  # of the rank, this process, whoever asks has them

    def resources(self) -> dict[str, Sample]:
        return {}  # likewise, and the engine's process is below this one

    @contextmanager
    def workers(
        self, placement: Placement, engine: EngineConfig, factory: Callable[..., W], /, *args: Any
    ) -> Iterator[InlineGroup[W]]:
        if placement.workers > 1:
            print(f"placement.workers is {placement.workers}: here one rank does it all", flush=True)
        with _threads(placement.num_threads):
            group = InlineGroup(factory, *args)
            try:
                yield group
            finally:
                group.shutdown()
                gc.collect()  # the memory is for the next stage of this process
                torch.cuda.empty_cache()

    @contextmanager
    def engines(self, spec: EngineSpec, context: StageContext, /) -> Iterator[OneEngine]:
        if spec.settings.config.engines > 1:
            print(f"rollout.engines is {spec.settings.config.engines}: here one engine does it all", flush=True)
        with self._open_engine(spec, context) as engine:
            yield engine

    @contextmanager
    def workers_and_engines(
        self, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, apart: Mapping[str, RankSpec[W]], /
    ) -> Iterator[tuple[InlineGroup[L], OneEngine, Mapping[str, InlineGroup[W]]]]:
        with ExitStack() as stack:
            # First: building the ranks that train seeds this process's random generators for the run.
            others = {
                name: stack.enter_context(self.workers(other.placement, other.engine, other.factory))
                for name, other in apart.items()
            }
            workers = stack.enter_context(self.workers(ranks.placement, ranks.engine, ranks.factory))
            if spec.settings.sleeps:  # an engine takes its memory when it starts
                workers.call(LendsDevice.offload)
            yield workers, stack.enter_context(self.engines(spec, context)), others


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _devices(spec: EngineSpec) -> dict[str, str]:
    """Assign the first GPU to the rank. The engine shares it if they take turns, else it has the others, if any."""
    count = torch.cuda.device_count()
    if count < 2 or spec.settings.sleeps:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(count))
    return {"CUDA_VISIBLE_DEVICES": visible.partition(",")[2]}
