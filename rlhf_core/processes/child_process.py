"""A process of this program's own, for what must not run in this one.

Imports no torch, so that the environment which the child is given counts there.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import psutil

from rlhf_core.errors import StageError
from rlhf_core.processes.child_output import ChildOutput, write_to
from rlhf_core.processes.children import end_with_parent, kill_below

P = ParamSpec("P")
R = TypeVar("R")


class ChildProcess:
    """Runs functions one after the other in a fresh Python. It ends with this process, however that ends.

    Closes with `close`, or as a context manager. Ctrl-C reaches this process alone.
    """

    def __init__(
        self, name: str, environment: Mapping[str, str] | None = None, output: ChildOutput | None = None
    ) -> None:
        """name: in errors. environment: variables that it gets before anything is imported. output: where all that it
        prints goes; none: where this process prints."""
        self._name = name
        self._executor = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(dict(environment or {}), output.path if output is not None else None),
        )
        self._newest: Future[Any] | None = None
        self.pid = self.call(os.getpid)

    def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(*args, **kwargs)` there; what it raises is raised here. Raises StageError if the process dies."""
        return self.result(self.begin(function, *args, **kwargs))

    def begin(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """As `call`, without waiting for its end."""
        try:
            self._newest = future = self._executor.submit(function, *args, **kwargs)
        except BrokenProcessPool as error:
            raise self._died() from error
        return future

    def result(self, future: Future[R]) -> R:
        """Of what was begun, when it has ended; what it raised is raised here."""
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._died() from error

    def _died(self) -> StageError:
        return StageError(
            f"{self._name} died: its last output is above; without any, it was probably killed for want of memory"
        )

    def close(self, *, at_once: bool = False) -> None:
        """End it: at once, or in order, unless it is still at work. Idempotent."""
        if at_once or (self._newest is not None and not self._newest.done()):
            self._kill()
        self._executor.shutdown()

    def _kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            kill_below(process)
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


def _begin(environment: Mapping[str, str], output: Path | None) -> None:
    if output is not None:
        write_to(output)
    os.environ.update(environment)
    end_with_parent()
