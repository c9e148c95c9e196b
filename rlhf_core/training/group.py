"""The interface of a group of training ranks for its driver, and a group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlhf_core.contract import Before, Started
from rlhf_core.training.background import Background
from rlhf_core.training.distributed import join_group

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


def host_memory_only(method: M) -> M:
    """Mark a worker's method that uses host memory only, and so may run while engines use the rank's device."""
    method.host_memory_only = True  # type: ignore[attr-defined]  # functions have attributes
    return method


def is_host_memory_only(method: Callable[..., Any]) -> bool:
    return getattr(method, "host_memory_only", False)


class WorkerGroup(Protocol[W_co]):
    """Ranks 0 ... size - 1, each with one worker object of class W; a method runs on all ranks at the same time.

    Methods are passed unbound, such as `group.call(RLWorker.save, folder)`; overrides in the worker's class apply.
    """

    before: Before

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, each of which is one rank or several."""

    def call(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return the results of `worker.method(*args)` by rank. Raises StageError if a worker dies."""

    def scatter(
        self, method: Callable[Concatenate[W_co, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Return the results of `worker.method(shards[replica], *args)` by replica, run on all of its ranks."""

    def put(self, shards: Sequence[S]) -> Sequence[S]:
        """Return references to `shards`, which several calls of `scatter`, of any group, send once."""

    def begin(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Started[R]:
        """Start a call and return at once. The ranks run no other call before it ends."""

    def aside(
        self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Start a call in a second thread of every rank, concurrent with other calls, and return at once.

        Only one such call may run at a time. The returned function waits for the results by rank, and raises as `call`
        does; any thread may call it.
        """

    def shutdown(self) -> None:
        """Stop the workers and release their resources."""


class InlineGroup(Generic[W]):
    """A group of one rank in this process, for debugging (`alignment try`) and tests."""

    def __init__(self, factory: Callable[..., W], *args: Any) -> None:
        join_group(rank=0, size=1)
        self.before: Before = lambda method: None
        self._worker: Any = factory(*args)

    @property
    def size(self) -> int:
        return 1

    @property
    def replicas(self) -> int:
        return 1

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        self.before(method)
        return [getattr(self._worker, method.__name__)(*args, **kwargs)]

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        if len(shards) != 1:
            raise ValueError(f"{method.__name__}: {len(shards)} shards for 1 replica")
        self.before(method)
        return [getattr(self._worker, method.__name__)(shards[0], *args, **kwargs)]

    def put(self, shards: Sequence[S]) -> Sequence[S]:
        return shards

    def begin(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Started[R]:
        return Started(self.aside(method, *args, **kwargs))

    def aside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        self.before(method)
        run = getattr(self._worker, method.__name__)
        return Background(lambda: [run(*args, **kwargs)], name=method.__name__).result

    def shutdown(self) -> None:
        self._worker = None
