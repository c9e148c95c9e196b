"""The hybrid engine: training ranks and vLLM engines share devices, and take turns on them.

One state machine says whose turn it is. Engines sleep while the ranks train; while the engines are awake, everything
that DeepSpeed keeps on a device lies in main memory. What is called in another's turn raises, before it can hang or run
out of memory:

    sampling ──train()──▶ training ──publish()──▶ publishing ──sample()──▶ sampling
        ▲                    │
        └─────sample()───────┘  only if train(keep_weights=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlhf_core.config.rl import RLConfig
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.engines import Advancing, Engines, SleepingEngines
from rlhf_core.rollout.proof import ProbeAnswer
from rlhf_core.rollout.publication import Publication
from rlhf_core.training.group import WorkerGroup, is_host_memory_only
from rlhf_core.types import Completion

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class LendsDevice(Protocol):
    """A worker that can give up its device."""

    def offload(self) -> None: ...

    def reload(self) -> None: ...


W = TypeVar("W", bound=LendsDevice)


class Turn(StrEnum):
    SAMPLING = "sampling"  # engines serve the version published last; the ranks' states are in main memory
    TRAINING = "training"  # the ranks have the devices; engines are asleep
    PUBLISHING = "publishing"  # engines are awake, but may not sample: their weights are old or gone


class Turns(Protocol):
    """Whoever is about to use the devices says so first. Asking for the turn that is on already does nothing."""

    def train(self, *, keep_weights: bool = False) -> None:
        """The ranks' turn. keep_weights: the engines will sample with the same weights again before a publish."""

    def publish(self) -> None:
        """The engines' turn, to be given weights. The ranks must have trained, or at least have written theirs."""

    def sample(self) -> None:
        """The engines' turn, with weights: those of a publish that was proven, or those they have kept."""


class OwnDevices:
    """Ranks and engines have devices of their own: it is always everybody's turn."""

    def train(self, *, keep_weights: bool = False) -> None: ...

    def publish(self) -> None: ...

    def sample(self) -> None: ...


class HybridEngine(Generic[W]):
    """Implements Turns. It begins with `sampling`: the engines are awake with version 0, the ranks have offloaded.

    An engine that sleeps gives its weights up (vLLM's level 2), since the publish that ends the ranks' turn brings them
    all: that spares main memory a copy of the model for each engine, and two copies over the bus. It keeps them (level
    1) where nothing would bring them again: for adapters, whose publish has no base weights, and before the same
    weights are to sample once more.
    """

    def __init__(self, workers: WorkerGroup[W], engines: SleepingEngines, *, adapters: bool) -> None:
        """adapters: a publish has LoRA factors only."""
        self._all_workers, self._all_engines = workers, engines
        self._adapters = adapters
        self._has_weights = True  # that may be sampled with, or may be again after a wake
        self.turn = Turn.SAMPLING
        self.workers: WorkerGroup[W] = _Ranks(workers, self)
        self.engines: Engines = _Engines(engines, self)
        workers.call(LendsDevice.offload)

    def train(self, *, keep_weights: bool = False) -> None:
        if self.turn is Turn.TRAINING:
            return
        self.require(Turn.SAMPLING, doing="train")
        self._has_weights = keep_weights or self._adapters
        self._all_engines.sleep(keep_weights=self._has_weights)
        self._all_workers.call(LendsDevice.reload)
        self.turn = Turn.TRAINING

    def publish(self) -> None:
        self.require(Turn.TRAINING, doing="publish")
        self._hand_over()
        self._has_weights = False
        self.turn = Turn.PUBLISHING

    def published(self) -> None:
        """The engines have loaded what they were given."""
        self._has_weights = True

    def sample(self) -> None:
        if not self._has_weights:
            raise RuntimeError(f"cannot sample in the state {self.turn}: the engines have no weights; publish first")
        if self.turn is Turn.TRAINING:
            self._hand_over()
        self.turn = Turn.SAMPLING

    def _hand_over(self) -> None:
        self._all_workers.call(LendsDevice.offload)
        self._all_engines.wake()

    def require(self, *turns: Turn, doing: str) -> None:
        """Raises RuntimeError, naming the state, unless it is one of `turns`."""
        if self.turn not in turns:
            raise RuntimeError(f"cannot {doing} in the state {self.turn}; this needs {' or '.join(turns)}")


def take_turns(
    config: RLConfig, workers: WorkerGroup[W], engines: SleepingEngines
) -> tuple[WorkerGroup[W], Engines, Turns]:
    """Ranks and engines as they are called from now on, and who says whose turn it is."""
    if not config.hybrid:
        return workers, engines, OwnDevices()
    hybrid = HybridEngine(workers, engines, adapters=config.served_lora is not None)
    return hybrid.workers, hybrid.engines, hybrid


class _Ranks(Generic[W]):
    """The ranks, in their turn."""

    def __init__(self, workers: WorkerGroup[W], hybrid: HybridEngine[W]) -> None:
        self._workers = workers
        self._hybrid = hybrid

    @property
    def size(self) -> int:
        return self._workers.size

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        self._require(method)
        return self._workers.call(method, *args, **kwargs)

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        self._require(method)
        return self._workers.scatter(method, shards, *args, **kwargs)

    def aside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        self._require(method)
        return self._workers.aside(method, *args, **kwargs)

    def _require(self, method: Callable[..., Any]) -> None:
        if not is_host_memory_only(method):
            self._hybrid.require(Turn.TRAINING, doing=method.__name__)

    def shutdown(self) -> None:
        self._workers.shutdown()


class _Engines:
    """The engines, in their turn."""

    def __init__(self, engines: Engines, hybrid: HybridEngine[Any]) -> None:
        self._engines = engines
        self._hybrid = hybrid

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        self._hybrid.require(Turn.SAMPLING, doing="generate")
        return self._engines.generate(requests, keep_prefixes=keep_prefixes)

    def forget(self) -> None:
        self._hybrid.require(Turn.SAMPLING, doing="forget")
        self._engines.forget()

    def each(self) -> Sequence[Advancing]:
        self._hybrid.require(Turn.SAMPLING, doing="generate")
        return self._engines.each()

    def publish(self, weights: Publication, version: int) -> None:
        self._hybrid.require(Turn.PUBLISHING, doing="load weights")
        self._engines.publish(weights, version)
        self._hybrid.published()

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        self._hybrid.require(Turn.PUBLISHING, Turn.SAMPLING, doing="probe")
        return self._engines.probe(sequences)
