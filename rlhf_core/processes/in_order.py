"""Parallel map over batches, with results and errors in the order of the batches."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rlhf_core.errors import StageError
from rlhf_core.processes.children import end_with_parent

B = TypeVar("B")
R = TypeVar("R")

_WAITING = 3  # batches for each process, done or not: bounds the memory


def in_order(function: Callable[[B], R], batches: Iterable[B], processes: int) -> Generator[R, None, None]:
    """Yield `function` of each batch, in order. The results do not depend on the number of processes.

    function: picklable, unless there is one process, which is this one. Exceptions of `function` and `batches` are
    raised after the results of the batches before. Raises StageError if a process dies.
    """
    if processes == 1:
        yield from map(function, batches)
        return
    # Fresh interpreters: a fork of a process with threads may find a lock held that nobody releases.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(function,)) as pool:
        try:
            yield from _in_order(pool, batches, processes * _WAITING)
        except BrokenProcessPool as error:
            raise StageError(
                "one of the `processes` died: its last output is above; without any, it was probably killed for want "
                "of memory: lower `processes`"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Any], waiting: int) -> Iterator[Any]:
    submitted: deque[Future[Any]] = deque()
    remaining, failure = iter(batches), None
    while True:
        try:
            batch = next(remaining)
        except StopIteration:
            break
        except Exception as error:  # of any type; raised after the earlier results
            failure = error
            break
        submitted.append(pool.submit(_call, batch))
        if len(submitted) > waiting:
            yield submitted.popleft().result()
    while submitted:
        yield submitted.popleft().result()
    if failure is not None:
        raise failure


_function: Callable[[Any], Any]


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    end_with_parent()
    _function = function


def _call(batch: Any) -> Any:
    return _function(batch)
