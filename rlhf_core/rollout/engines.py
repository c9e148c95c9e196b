"""The interface of a group of rollout engines with the same weights, and groups of one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlhf_core.contract import Before
from rlhf_core.errors import ActorDiedError, StageError
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.publication import Publication
from rlhf_core.rollout.transport.base import TransportError, WeightManifest

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

_MOST_REPLACEMENTS = 3  # of dead engines in one call; then the job ends


class Engines(Protocol):
    """Engines 0 ... size - 1. Methods are passed unbound, such as `engines.call(RolloutEngine.wake)`."""

    before: Before

    @property
    def size(self) -> int:
        """The number of engines."""

    def call(self, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return the results of `engine.method(*args)` of all engines. Raises StageError if an engine dies."""

    def call_on(
        self, index: int, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return the result of `engine.method(*args)` of engine `index`."""

    def share(
        self, method: Callable[Concatenate[RolloutEngine, Sequence[S], P], list[R]], items: Sequence[S], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> list[R]:  # fmt: skip
        """Divide `items` among the engines; returns the results of `engine.method(part, *args)` in item order."""

    def replace_dead(self) -> list[str]:
        """Restart the engines that have died, and let the others abandon what they have begun.

        Returns the names of the new ones, which serve version 0: all engines need a publish. Empty if none has died, or
        none can be restarted. Raises StageError if one does not start.
        """

    def publish(self, weights: Publication) -> None:
        """Load `weights` into every engine, to be checked by proof.verify_weights.

        With a concurrent transport, sending must have started: see `hand_over`.
        """


class OneEngine(ABC):
    """A group of one engine."""

    size = 1

    def __init__(self) -> None:
        self.before: Before = lambda method: None

    def call(self, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [self.call_on(0, method, *args, **kwargs)]

    def call_on(
        self, index: int, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self.before(method)
        result: R = self._run(method.__name__, args, kwargs)
        return result

    def share(
        self, method: Callable[Concatenate[RolloutEngine, Sequence[S], P], list[R]], items: Sequence[S], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> list[R]:  # fmt: skip
        return self.call_on(0, method, items, *args, **kwargs)

    def replace_dead(self) -> list[str]:
        return []

    def publish(self, weights: Publication) -> None:
        self.call(RolloutEngine.load_weights, weights.transport, weights.manifest)

    def shutdown(self) -> None:
        self._run("shutdown", (), {})

    @abstractmethod
    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the engine's method of this name."""


def hand_over(engines: Engines, weights: Publication) -> WeightManifest:
    """Send `weights` to every engine; returns their manifest, with the digests of the sent tensors.

    Raises the error of an engine or of a rank, or both if each reports only that the other end failed.
    """
    if weights.start is None:
        engines.publish(weights)
        return weights.manifest
    sending = weights.start()
    try:
        engines.publish(replace(weights, sending=sending))
    except ActorDiedError as error:  # the ranks are still sending: no publish can follow
        raise StageError(str(error)) from error
    except TransportError as error:  # the cause may be an earlier error of the ranks
        try:
            sending.results()
        except TransportError as rank_error:
            raise TransportError(f"{error}; {rank_error}") from error
        raise
    return replace(weights.manifest, digests=sending.results()[0])


def survive_dead_engines(call: Callable[[], R], replace_dead: Callable[[], list[str]], retried: str) -> R:
    """Return the result of `call`, retried on new engines in place of those that die meanwhile, three times at most.

    replace_dead: starts them, and returns their names; if none, the error is raised. retried: for the job's output.
    """
    for _ in range(_MOST_REPLACEMENTS):
        try:
            return call()
        except ActorDiedError as error:
            if not (names := replace_dead()):
                raise
            print(f"{error}; {', '.join(names)} restarted, {retried}", flush=True)
    return call()


def verb(method: Callable[..., Any]) -> str:
    """Return the verb for a method in errors; `advance` is reported as generate."""
    return "generate" if method.__name__ == "advance" else method.__name__.replace("_", " ")
