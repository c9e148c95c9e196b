"""Rollout engines as Ray actors, called as one group and serving one version of the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.actors import forwarding
from rlhf_core.actors.calls import THREADS, Actor, failing, leave, wait
from rlhf_core.actors.placement import reserve, runtime_environment
from rlhf_core.actors.resources import measured
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.config.plugins import required
from rlhf_core.contract import Before, StageContext
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine, start_engine
from rlhf_core.rollout.engines import verb
from rlhf_core.rollout.publication import Publication
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.rollout.transport.folder import Files, SharedFolder, received

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 900.0  # a large model from a cold disk


def engine_bundles(config: RolloutEngineConfig) -> list[dict[str, float]]:
    """Return the bundles to reserve, one per engine."""
    bundle = {"CPU": config.cpus_per_engine}
    if config.gpus_per_engine:
        bundle["GPU"] = config.gpus_per_engine
    return [dict(bundle) for _ in range(config.engines)]


class EngineActor(Actor):
    """One engine in its own process, on any node; it fetches the model itself."""

    def start(self, model: ArtifactRef, context: StageContext, settings: EngineSettings, gpus: Sequence[str]) -> None:
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._engine = start_engine(context.fetch(model).folder, settings)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)

    def load(self, transport: Transport, manifest: WeightManifest) -> bool:
        """Load published weights; return False if they are on another node."""
        if not transport.is_here():
            return False
        self._engine.load_weights(transport, manifest)
        return True

    def load_files(self, files: Files, manifest: WeightManifest) -> None:
        with received(files) as folder:
            self._engine.load_weights(SharedFolder(folder), manifest)


class EngineGroup:
    """N engines with the same weights, started in parallel. The constructor returns at once; any call waits for them.

    Implements rollout.engines.Engines. Close it with `shutdown`, or use it as a context manager.
    """

    def __init__(
        self,
        model: ArtifactRef,
        context: StageContext,
        settings: EngineSettings,
        *,
        placement_group: PlacementGroup | None = None,
        first_bundle: int = 0,
        gpus: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """placement_group: already reserved, engine i in bundle first_bundle + i; None: the group reserves its own.
        gpus: of each engine, as in CUDA_VISIBLE_DEVICES, which actors in its bundle have from Ray; None: Ray gives it
        its own.
        """
        self.before: Before = lambda method: None
        self._stack = ExitStack()
        self._actors: dict[str, Any] = {}
        self._starts: dict[Any, str] = {}  # reference -> name
        self._model, self._context, self._settings, self._gpus = model, context, settings, gpus
        self._first_bundle = first_bundle
        with ExitStack() as started:
            started.callback(self.shutdown)
            self._group = placement_group or self._stack.enter_context(reserve(engine_bundles(settings.config)))
            for index in range(settings.config.engines):
                self._start_engine(index)
            self._stack.enter_context(measured(lambda: {} if self._starts else self._actors))
            started.pop_all()

    def _start_engine(self, index: int) -> None:
        name, config = f"engine {index}", self._settings.config
        num_gpus = config.gpus_per_engine if self._gpus is None else 0
        actor = self._actors[name] = _create(config, num_gpus, self._group, self._first_bundle + index)
        self._stack.callback(ray.kill, actor)
        gpus = self._gpus[index] if self._gpus else []
        self._starts[actor.inherit.remote(name, forwarding.received(), required())] = name
        self._starts[actor.start.remote(self._model, self._context, self._settings, gpus)] = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until all engines are ready. Raises StageError, naming the engine, if one fails or is not in time."""
        starts, self._starts = self._starts, {}
        wait("start", starts, timeout_seconds)

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        self._prepare(method)
        return wait(verb(method), {self._start(name, method, *args, **kwargs): name for name in self._actors})

    def call_on(
        self, index: int, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._prepare(method)
        name = [*self._actors][index]
        result: R
        (result,) = wait(verb(method), {self._start(name, method, *args, **kwargs): name})
        return result

    def share(
        self, method: Callable[Concatenate[RolloutEngine, Sequence[S], P], list[R]], items: Sequence[S], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> list[R]:  # fmt: skip
        self._prepare(method)
        calls = {
            self._start(name, method, items[i:j], *args, **kwargs): name
            for name, (i, j) in self._slices(len(items)).items()
        }
        return [result for share in wait(verb(method), calls) for result in share]

    def publish(self, weights: Publication) -> None:
        """Load `weights` into every engine: the whole model or, with LoRA, the adapter.

        Raises WeightSyncError if they do not fit the model. proof.verify_weights checks that they are served.
        """
        self._prepare(RolloutEngine.load_weights)
        manifest = weights.manifest
        loads = {
            actor.load.remote(weights.transport.for_engine(index), manifest): name
            for index, (name, actor) in enumerate(self._actors.items())
        }
        loaded = wait("load", loads, needed={} if weights.sending is None else weights.sending.calls)
        elsewhere = {name: actor for (name, actor), here in zip(self._actors.items(), loaded, strict=True) if not here}
        if elsewhere:
            # Put once: Ray copies the files to each node once, where the engines share the memory.
            files = ray.put(weights.files())
            wait("load", {actor.load_files.remote(files, manifest): name for name, actor in elsewhere.items()})

    def replace_dead(self) -> list[str]:
        abandoned = {self._start(name, RolloutEngine.abandon): name for name in self._actors}
        dead = failing(abandoned, START_SECONDS)  # a call of before may still run
        for index, name in enumerate(list(self._actors)):
            if name in dead:
                ray.kill(self._actors[name])  # one that lives, but fails
                self._start_engine(index)
        self.wait_ready()
        return dead

    def _prepare(self, method: Callable[..., Any]) -> None:
        self.before(method)
        self.wait_ready()

    def _start(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._actors[name].call.remote(method.__name__, *args, **kwargs)

    def _slices(self, count: int) -> dict[str, tuple[int, int]]:
        """Return contiguous slices of `count` items by engine, as even as possible; empty ones are omitted."""
        size, remainder = divmod(count, len(self._actors))
        ends = accumulate((size + (index < remainder) for index in range(len(self._actors))), initial=0)
        return {name: (i, j) for name, (i, j) in zip(self._actors, pairwise(ends), strict=True) if i < j}

    def shutdown(self) -> None:
        """End the engines and release what this group reserved."""
        actors, self._actors, self._starts = self._actors, {}, {}
        leave(actors)
        self._stack.close()


def _create(config: RolloutEngineConfig, num_gpus: float, group: PlacementGroup, bundle: int) -> Any:
    # Set before the actor imports torch: OpenMP reads it once.
    environment = {"OMP_NUM_THREADS": str(config.num_threads), "HF_HUB_OFFLINE": "1"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    engine: Any = ray.remote(concurrency_groups=THREADS)(EngineActor)  # type: ignore[call-overload]  # as for ranks
    return engine.options(
        num_cpus=config.cpus_per_engine,
        num_gpus=num_gpus,
        max_restarts=0,  # by Ray, which would serve the weights of version 0: see `replace_dead`
        runtime_env=runtime_environment(environment),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    ).remote()  # fmt: skip
