"""A group of training ranks, seen from its driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlhf_core.contract import Before
from rlhf_core.training.background import Background
from rlhf_core.training.distributed import join_group

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


def host_memory_only(method: M) -> M:
    """Marks a worker's method that touches host memory alone: it may run while the device is lent to others."""
    method.host_memory_only = True  # type: ignore[attr-defined]  # functions have attributes
    return method


def is_host_memory_only(method: Callable[..., Any]) -> bool:
    return getattr(method, "host_memory_only", False)


class WorkerGroup(Protocol[W_co]):
    """Ranks 0 ... size - 1, each with one worker object of class W; a method runs on all ranks at the same time.

    Methods are passed unbound, such as `group.call(RLWorker.save, folder)`; a worker's own override is what runs.
    """

    before: Before

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, each of which is one rank or several."""

    def call(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`worker.method(*args)` on every rank; the results by rank. Raises StageError if a worker dies."""

    def scatter(
        self, method: Callable[Concatenate[W_co, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """`worker.method(shards[replica], *args)` on every rank, of its replica; the results by replica."""

    def begin(
        self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """As `call`, but returns at once: a function that waits for the results by rank, and raises as `call`. The
        ranks take up no other call before."""

    def aside(
        self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Start `worker.method(*args)` on every rank, in a thread beside its other calls, and return at once; one such
        call at a time. The returned function waits for the results by rank, in any thread, and raises as `call`."""

    def shutdown(self) -> None:
        """End the workers and release their resources."""


class InlineGroup(Generic[W]):
    """One rank in this process, where a debugger reaches it: for `alignment try` and tests."""

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

    def begin(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        return self.aside(method, *args, **kwargs)

    def aside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        self.before(method)
        run = getattr(self._worker, method.__name__)
        return Background(lambda: [run(*args, **kwargs)], name=method.__name__).result

    def shutdown(self) -> None:
        self._worker = None
