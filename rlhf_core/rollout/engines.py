"""A group of rollout engines with the same weights: actors.EngineGroup, and groups of one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlhf_core.contract import Before
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.publication import Publication
from rlhf_core.rollout.transport.base import TransportError, WeightManifest

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class Engines(Protocol):
    """Engines 0 ... size - 1. Methods are passed unbound, such as `engines.call(RolloutEngine.wake)`."""

    before: Before

    @property
    def size(self) -> int:
        """The number of engines."""

    def call(self, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`engine.method(*args)` on every engine; the results in their order. Raises StageError if an engine dies."""

    def call_on(
        self, index: int, method: Callable[Concatenate[RolloutEngine, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """`engine.method(*args)` on one engine."""

    def share(
        self, method: Callable[Concatenate[RolloutEngine, Sequence[S], P], list[R]], items: Sequence[S], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> list[R]:  # fmt: skip
        """`engine.method(part of items, *args)` on the engines; the results of all items in their order."""

    def publish(self, weights: Publication) -> None:
        """Every engine serves `weights` from now on; proof.verify_weights checks that it does.

        Of weights that travel while they are sent, they must be on their way: see `hand_over`.
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

    def publish(self, weights: Publication) -> None:
        self.call(RolloutEngine.load_weights, weights.transport, weights.manifest)

    def shutdown(self) -> None:
        self._run("shutdown", (), {})

    @abstractmethod
    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the engine's method of this name."""


def hand_over(engines: Engines, weights: Publication) -> WeightManifest:
    """Every engine serves `weights` from now on; returns their manifest, with the digests of what was sent.

    Raises the error of an engine or of a rank, or of both where neither is the cause of the other.
    """
    if weights.start is None:
        engines.publish(weights)
        return weights.manifest
    sent = weights.start()
    try:
        engines.publish(weights)
    except TransportError as error:  # the ranks may have failed first, and their side of the transport soon ends
        try:
            sent()
        except TransportError as other:
            raise TransportError(f"{error}; {other}") from error
        raise
    return replace(weights.manifest, digests=sent())


def verb(method: Callable[..., Any]) -> str:
    """The word for a call in errors: `advance` generates too."""
    return "generate" if method.__name__ == "advance" else method.__name__.replace("_", " ")
