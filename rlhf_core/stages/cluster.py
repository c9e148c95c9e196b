"""The cluster interface for a stage's actors: on Ray (ray_cluster.py), or in one process (in_process.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.rl.hybrid import LendsDevice
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import Engines
from rlhf_core.system.resources import Sample
from rlhf_core.training.group import WorkerGroup

W = TypeVar("W")
L = TypeVar("L", bound=LendsDevice)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engines of a stage, all alike."""

    model: Input  # served as version 0
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class RankSpec(Generic[W]):
    """A group of ranks, with the factory of each rank's worker."""

    placement: Placement
    engine: EngineConfig  # of its models, which divide the ranks alike
    factory: Callable[[], W]


class Cluster(Protocol):
    """Starts the ranks and the engines of a stage; each context ends them in any case."""

    def stacks(self) -> Mapping[str, str]:
        """Return the stacks of the processes that it has started, by name."""

    def resources(self) -> Mapping[str, Sample]:
        """Return what the processes use that it has started elsewhere, by name. Any thread may call it."""

    def workers(
        self, placement: Placement, engine: EngineConfig, factory: Callable[..., W], /, *args: Any
    ) -> AbstractContextManager[WorkerGroup[W]]:
        """Start ranks, each with the worker `factory(*args)`. engine: of its models, as in RankSpec."""

    def engines(self, spec: EngineSpec, context: StageContext, /) -> AbstractContextManager[Engines]:
        """Start engines; they are ready on entry."""

    def workers_and_engines(
        self, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, apart: Mapping[str, RankSpec[W]], /
    ) -> AbstractContextManager[tuple[WorkerGroup[L], Engines, Mapping[str, WorkerGroup[W]]]]:
        """Start ranks, engines, and further groups of ranks by name, all reserved together.

        If engines sleep, rank i and engine i share a device, owned by the rank; the groups in `apart` have their own.
        """
