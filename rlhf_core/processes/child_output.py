"""The output of a child process, kept until it fails: much of what libraries print does not help users of a command."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from threading import Lock, Thread

from rlhf_core.system.scratch import scratch_folder

_KEPT = 64 * 1024  # bytes, the last ones


class ChildOutput:
    """Output of the processes that open the pipe `path`, and of their descendants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR)  # so that it does not end with its last writer
        self._ended, self._end = os.pipe()
        self.kept = b""  # of the output that was not shown
        self._passes = False
        self._lock = Lock()
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def show(self) -> None:
        """Print the kept output, and all further output."""
        with self._lock:
            self._passes = True
            _print(self.kept)
            self.kept = b""

    def follow(self) -> None:
        """Drop the kept output, and print all further output."""
        with self._lock:
            self._passes, self.kept = True, b""

    def keep(self) -> None:
        """Stop printing."""
        with self._lock:
            self._passes = False

    def close(self) -> None:
        """Close the pipe, after its processes have ended."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ended)
        os.close(self._pipe)

    def _read(self) -> None:
        while self._pipe in select.select([self._pipe, self._ended], [], [])[0]:
            printed = os.read(self._pipe, 1 << 16)
            with self._lock:
                if self._passes:
                    _print(printed)
                else:
                    self.kept = (self.kept + printed)[-_KEPT:]


def _print(printed: bytes) -> None:
    sys.stderr.flush()
    while printed:
        printed = printed[os.write(2, printed) :]


@contextmanager
def kept_output() -> Iterator[ChildOutput | None]:
    """Keep output, and print it if the context ends with an error. Yields None if VLLM_LOGGING_LEVEL is set."""
    if "VLLM_LOGGING_LEVEL" in os.environ:
        yield None
        return
    _silence_tracker()
    with scratch_folder("output") as folder:
        output = ChildOutput(folder / "pipe")
        try:
            yield output
        except Exception:
            output.show()
            raise
        finally:
            output.close()


def write_to(path: Path) -> None:
    """Redirect all output of this process and its descendants to `path`."""
    pipe = os.open(path, os.O_WRONLY)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


def _silence_tracker() -> None:
    """Silence Python's tracker of shared semaphores: it outlives the others, and lists those of killed processes."""
    sys.stderr.flush()
    shown = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)
