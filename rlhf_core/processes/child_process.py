"""A child process of this program, for code that must not run in this process.

Imports no torch, so that the environment of the child takes effect there.
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
        """name: for errors. environment: variables that are set before anything is imported. output: target of all its
        output; none: that of this process.
        """
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
        """Run `function(*args, **kwargs)` in the child.

        Raises the function's exceptions, and StageError if the process dies.
        """
        return self.result(self.begin(function, *args, **kwargs))

    def begin(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start a call, as `call` does, and return its future."""
        try:
            self._newest = future = self._executor.submit(function, *args, **kwargs)
        except BrokenProcessPool as error:
            raise self._died() from error
        return future

    def result(self, future: Future[R]) -> R:
        """Wait for a call started by `begin`; return its result or raise its exception."""
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._died() from error

    def _died(self) -> StageError:
        return StageError(
            f"{self._name} died: its last output is above; without any, it was probably killed for want of memory"
        )

    def close(self, *, at_once: bool = False) -> None:
        """Terminate the child: at once, or in order unless it is still at work. Idempotent."""
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
