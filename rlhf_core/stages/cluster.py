"""Where the actors of a stage run: on Ray (ray_cluster.py), or in one process (in_process.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlhf_core.config.engines.placement import Placement
from rlhf_core.contract import Input, StageContext
from rlhf_core.rl.hybrid import LendsDevice
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import Engines
from rlhf_core.training.group import WorkerGroup

W = TypeVar("W")
L = TypeVar("L", bound=LendsDevice)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engines of a stage: all alike."""

    model: Input  # served as version 0
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class RankSpec(Generic[W]):
    """A group of ranks, each with a worker that `factory` builds there."""

    placement: Placement
    factory: Callable[[], W]


class Cluster(Protocol):
    """Starts the ranks and the engines of a stage; each context ends them, whatever happens in it."""

    def workers(
        self, placement: Placement, factory: Callable[..., W], /, *args: Any
    ) -> AbstractContextManager[WorkerGroup[W]]:
        """The ranks, each with the worker `factory(*args)`."""

    def engines(self, spec: EngineSpec, context: StageContext, /) -> AbstractContextManager[Engines]:
        """Engines that are ready."""

    def workers_and_engines(
        self, ranks: RankSpec[L], spec: EngineSpec, context: StageContext, apart: Mapping[str, RankSpec[W]], /
    ) -> AbstractContextManager[tuple[WorkerGroup[L], Engines, Mapping[str, WorkerGroup[W]]]]:
        """Ranks, engines, and further groups of ranks by name, all reserved together. Where engines sleep, rank i and
        engine i share a device, which the rank has lent; the groups in `apart` have their own."""
