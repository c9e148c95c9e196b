"""The hybrid engine: training ranks and vLLM engines share devices, and use them in turn.

A state machine has the current turn. Engines sleep while the ranks train; while the engines are awake, DeepSpeed's
state is offloaded to host memory. A call outside its turn raises, before it can hang or run out of memory:

    sampling ──train()──▶ training ──publish()──▶ publishing ──sample()──▶ sampling
        ▲                    │
        └─────sample()───────┘  only if train(keep_weights=True)

Weights that are handed over on the device (`rollout.transport: ipc`) are on it twice: in the first part of publishing,
until `serve()`, the ranks are still there, and engines have memory for weights alone.
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
    """A worker that can offload its device."""

    def offload(self) -> None: ...

    def reload(self) -> None: ...


W = TypeVar("W", bound=LendsDevice)


class Turn(StrEnum):
    SAMPLING = "sampling"  # engines serve the version published last; the ranks are offloaded to host memory
    TRAINING = "training"  # the ranks use the devices; engines are asleep
    PUBLISHING = "publishing"  # engines are awake, but must not sample: their weights are stale or dropped


_TURNS_OF_ENGINES = {  # by method; all others need SAMPLING
    "load_weights": (Turn.PUBLISHING,),
    "probe": (Turn.PUBLISHING, Turn.SAMPLING),
    "wake": (Turn.PUBLISHING,),
}


class Turns(Protocol):
    """Callers acquire the devices before use. `train` and `sample` are no-ops in their own turn."""

    def train(self, *, keep_weights: bool = False) -> None:
        """Start the ranks' turn. keep_weights: the engines will sample with the same weights again before a publish."""

    def publish(self) -> None:
        """Start the engines' turn to load weights. On shared devices, the ranks must have written theirs before, or
        hand them over now."""

    def serve(self) -> None:
        """Let the engines compute with loaded weights, which the ranks have sent."""

    def sample(self) -> None:
        """Start the engines' turn to sample, with published and verified weights, or with those they have kept."""


class OwnDevices:
    """Turns without shared devices: every transition is a no-op."""

    def train(self, *, keep_weights: bool = False) -> None: ...

    def publish(self) -> None: ...

    def serve(self) -> None: ...

    def sample(self) -> None: ...


class HybridEngine(Generic[W]):
    """Turns on shared devices. Starts in `sampling`: the engines are awake with version 0, the ranks are offloaded.

    A sleeping engine drops its weights (vLLM's sleep level 2), since the publish after the ranks' turn replaces all of
    them: this saves a copy of the model in host memory for each engine, and two copies over the bus. It keeps them
    (level 1) if no publish replaces them: for adapters, published without base weights, and if the same weights are to
    sample again.
    """

    def __init__(self, workers: WorkerGroup[W], engines: Engines, *, adapters: bool, on_device: bool = False) -> None:
        """adapters: whether a publish has LoRA factors only. on_device: whether ranks send weights from the device."""
        self.workers, self.engines = workers, engines
        self._adapters, self._on_device = adapters, on_device
        self._sending = False  # the ranks are on the devices during `publishing`
        self._has_weights = True  # for sampling, at once or after a wake
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
        if self._on_device:
            self._sending, self.turn = True, Turn.PUBLISHING
            self.engines.call(RolloutEngine.wake, cache=False)
        else:
            self._wake_engines()
        self._has_weights = False

    def serve(self) -> None:
        self._require(Turn.PUBLISHING, doing="serve")
        if self._sending:
            self.workers.call(LendsDevice.offload)
            self._sending = False
            self.engines.call(RolloutEngine.wake)

    def sample(self) -> None:
        if not self._has_weights or self._sending:
            raise RuntimeError(f"cannot sample in the state {self.turn}: the engines have no weights; publish first")
        if self.turn is Turn.TRAINING:
            self._wake_engines()
        self.turn = Turn.SAMPLING

    def _wake_engines(self) -> None:
        self.workers.call(LendsDevice.offload)
        self.turn = Turn.PUBLISHING
        self.engines.call(RolloutEngine.wake)

    def _before_ranks(self, method: Callable[..., Any]) -> None:
        if self._sending and method.__name__ in ("send_weights", "offload"):
            return
        if not is_host_memory_only(method):
            self._require(Turn.TRAINING, doing=method.__name__)

    def _before_engines(self, method: Callable[..., Any]) -> None:
        self._require(*_TURNS_OF_ENGINES.get(method.__name__, (Turn.SAMPLING,)), doing=verb(method))
        if self._sending and method.__name__ == "probe":
            raise RuntimeError("cannot probe while the ranks are on the devices; serve first")
        if method.__name__ == "load_weights":  # if it fails, the run ends
            self._has_weights = True

    def _require(self, *turns: Turn, doing: str) -> None:
        """Raise RuntimeError, naming the state, unless it is one of `turns`."""
        if self.turn not in turns:
            raise RuntimeError(f"cannot {doing} in the state {self.turn}; this needs {' or '.join(turns)}")


def turns_of(config: RLConfig, workers: WorkerGroup[W], engines: Engines) -> Turns:
    """Return the turns of ranks and engines, enforced from now on if they share devices."""
    if not config.hybrid:
        return OwnDevices()
    on_device = config.rollout.transport == "ipc"
    return HybridEngine(workers, engines, adapters=config.served_lora is not None, on_device=on_device)
