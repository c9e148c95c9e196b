"""The hybrid engine: training ranks and vLLM engines share devices, and take turns on them.

One state machine says whose turn it is. Engines sleep while the ranks train; while the engines are awake, everything
that DeepSpeed keeps on a device lies in main memory. What is called in another's turn raises, before it can hang or run
out of memory:

    sampling ──train()──▶ training ──publish()──▶ publishing ──sample()──▶ sampling
        ▲                    │
        └─────sample()───────┘  only if train(keep_weights=True)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import Engines, verb
from rlhf_core.training.group import WorkerGroup, is_host_memory_only


class LendsDevice(Protocol):
    """A worker that can give up its device."""

    def offload(self) -> None: ...

    def reload(self) -> None: ...


W = TypeVar("W", bound=LendsDevice)


class Turn(StrEnum):
    SAMPLING = "sampling"  # engines serve the version published last; the ranks' states are in main memory
    TRAINING = "training"  # the ranks have the devices; engines are asleep
    PUBLISHING = "publishing"  # engines are awake, but may not sample: their weights are old or gone


_TURNS_OF_ENGINES = {  # of their methods; others are called while they sample
    "load_weights": (Turn.PUBLISHING,),
    "probe": (Turn.PUBLISHING, Turn.SAMPLING),
    "wake": (Turn.PUBLISHING,),
}


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

    def __init__(self, workers: WorkerGroup[W], engines: Engines, *, adapters: bool) -> None:
        """adapters: a publish has LoRA factors only."""
        self.workers, self.engines = workers, engines
        self._adapters = adapters
        self._has_weights = True  # that may be sampled with, or may be again after a wake
        self.turn = Turn.SAMPLING
        workers.call(LendsDevice.offload)
        workers.before, engines.before = self._before_ranks, self._before_engines

    def train(self, *, keep_weights: bool = False) -> None:
        if self.turn is Turn.TRAINING:
            return
        self._require(Turn.SAMPLING, doing="train")
        self._has_weights = keep_weights or self._adapters
        self.engines.call(RolloutEngine.sleep, keep_weights=self._has_weights)
        self.turn = Turn.TRAINING
        self.workers.call(LendsDevice.reload)

    def publish(self) -> None:
        self._require(Turn.TRAINING, doing="publish")
        self._hand_over()
        self._has_weights = False

    def sample(self) -> None:
        if not self._has_weights:
            raise RuntimeError(f"cannot sample in the state {self.turn}: the engines have no weights; publish first")
        if self.turn is Turn.TRAINING:
            self._hand_over()
        self.turn = Turn.SAMPLING

    def _hand_over(self) -> None:
        self.workers.call(LendsDevice.offload)
        self.turn = Turn.PUBLISHING
        self.engines.call(RolloutEngine.wake)

    def _before_ranks(self, method: Callable[..., Any]) -> None:
        if not is_host_memory_only(method):
            self._require(Turn.TRAINING, doing=method.__name__)

    def _before_engines(self, method: Callable[..., Any]) -> None:
        self._require(*_TURNS_OF_ENGINES.get(method.__name__, (Turn.SAMPLING,)), doing=verb(method))
        if method.__name__ == "load_weights":  # an error of it ends the run
            self._has_weights = True

    def _require(self, *turns: Turn, doing: str) -> None:
        """Raises RuntimeError, naming the state, unless it is one of `turns`."""
        if self.turn not in turns:
            raise RuntimeError(f"cannot {doing} in the state {self.turn}; this needs {' or '.join(turns)}")


def turns_of(config: RLConfig, workers: WorkerGroup[W], engines: Engines) -> Turns:
    """Says from now on whose turn it is."""
    if not config.hybrid:
        return OwnDevices()
    return HybridEngine(workers, engines, adapters=config.served_lora is not None)
