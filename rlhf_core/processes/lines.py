"""Both ends of a child process that replies to each line of JSON with one. Imports only the standard library."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from json import dumps, loads  # the user's file may replace those of the module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

import rlhf_core
from rlhf_core.system.terminal import open_standard_files

_ENDING_SECONDS = 5.0  # that a process may take to end once it has closed its files
_SIGNALS = frozenset(map(int, signal.Signals))
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class ProcessError(Exception):
    """A process ended before it replied. The text is that of `how_it_ended`."""


class LineProcess:
    """A Python program that leads a process group of its own.

    Only `close` reaps it, after killing the group: until then no other process can have its pid.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | int | None = None,
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """arguments: of `python`. environment: all of its variables; none: those of this process, plus the path of our
        code. log: target of its standard error; none: that of this process. folder: working folder; none: that of this
        process. descriptors: files that it inherits.
        """
        self._unread = b""
        with _blocked_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # modules are not looked for in its folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=_with_our_code() if environment is None else environment,
                start_new_session=True,
                pass_fds=descriptors,
            )
        self._watch = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, request: Any, seconds: float | None) -> Any:
        """Send a request and return the reply. Raises TimeoutError, ProcessError, or ValueError if it is not JSON."""
        assert self._process.stdin is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            self._process.stdin.write(dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        return loads(self._line(deadline))

    def _line(self, deadline: float | None) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            readable = _readable([descriptor, self._watch], None if deadline is None else deadline - time.monotonic())
            if not readable:
                raise TimeoutError
            # A descendant may hold the pipe open when the process has ended.
            received = os.read(descriptor, 1 << 20) if descriptor in readable else b""
            if not received:
                raise self._ended()
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> ProcessError:
        status = self.status(_ENDING_SECONDS)
        return ProcessError("closed its files" if status is None else how_it_ended(status))

    def status(self, seconds: float = 0.0) -> int | None:
        """Return the exit status, negative for a signal; None if the process does not end within `seconds`."""
        if not _readable([self._watch], seconds):
            return None
        ended = os.waitid(os.P_PIDFD, self._watch, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def close(self, *, after_seconds: float = 0.0) -> None:
        """Kill the process with its descendants, after `after_seconds` to end by itself. Idempotent."""
        if self._process.returncode is None:
            self.status(after_seconds)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            # Not read to its end: a process that has left the group may hold it open.
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # of a request that was not read
                    pipe.close()
            os.close(self._watch)

    def __del__(self) -> None:
        if hasattr(self, "_watch"):  # else it could not be started
            self.close()


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start processes that SIGINT does not end: it stops a job, which needs them until its step ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_our_code() -> dict[str, str]:
    home = str(Path(rlhf_core.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}


def _readable(descriptors: Sequence[int], seconds: float | None) -> set[int]:
    """Return the descriptors that become readable, or are closed at the other end, within `seconds`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, 1000 * seconds))}


def how_it_ended(status: int) -> str:
    """Return the predicate of "its process": "was killed (signal 9), usually because memory ran out", "ended with
    status 3".

    status: negative for a signal, as in Python, or above 128, as in a shell.
    """
    number = -status if status < 0 else status - 128
    if number not in _SIGNALS:
        return f"ended with status {status}"
    if number == signal.SIGKILL:
        return "was killed (signal 9), usually because memory ran out"
    crash = ", a crash in compiled code" if number in _CRASHES else ""
    return f"was ended by signal {number} ({signal.Signals(number).name}){crash}"


def open_pipes() -> tuple[IO[str], IO[str]]:
    """In the child: return the streams of requests and replies, and redirect standard input and output to the log's."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    open_standard_files()
    return requests, replies


def received(lines: IO[str] | IO[bytes]) -> Iterator[Any]:
    """Yield the requests, in the child, which leads its group.

    At their end the group is killed, even while it computes.
    """
    queue: SimpleQueue[str | bytes] = SimpleQueue()

    def read() -> None:
        with suppress(ConnectionError):
            for line in lines:
                queue.put(line)
        os.killpg(0, signal.SIGKILL)  # not where the user's code has closed our files: that is an error of its own

    Thread(target=read, daemon=True).start()
    while True:
        yield loads(queue.get())
