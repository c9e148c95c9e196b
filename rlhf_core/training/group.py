"""A group of training ranks, seen from its driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rlhf_core.training.background import Background
from rlhf_core.training.distributed import join_group


class WorkerGroup(Protocol):
    """Ranks 0 ... size - 1, each with one worker object; a method runs on all ranks at the same time."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """`worker.method(*args)` on every rank; the results by rank. Raises StageError if a worker dies."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """`worker.method(shards[rank], *args)` on every rank; the results by rank."""

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Run a generator method on every rank to its end; yields the items of rank 0 as they come."""

    def aside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Begin `worker.method(*args)` on every rank, in a thread beside its other calls, and return at once; one such
        call at a time. What is returned waits for the results by rank, in any thread, and raises as `call` does."""

    def shutdown(self) -> None:
        """End the workers and give back what was reserved for them."""


class InlineGroup:
    """One rank in this process: for tests, and for a run so small that a second process costs more than it gives."""

    def __init__(self, factory: Callable[..., Any], *args: Any) -> None:
        join_group(rank=0, size=1)
        self._worker = factory(*args)

    @property
    def size(self) -> int:
        return 1

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        if len(shards) != 1:
            raise ValueError(f"{method}: {len(shards)} shards for 1 rank")
        return [getattr(self._worker, method)(shards[0], *args)]

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        yield from getattr(self._worker, method)(*args)

    def aside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        return Background(lambda: self.call(method, *args), name=method).result

    def shutdown(self) -> None:
        self._worker = None
