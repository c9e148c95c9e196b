"""Fork server: forks a process that has its imports loaded, once per request. Imports only the standard library."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, cast

_SET_DEATH_SIGNAL = 1  # of prctl
File = socket.socket | int
Ended = Callable[[int, int, resource.struct_rusage], None]


@dataclass(frozen=True, slots=True)
class Request:
    play: Callable[[], None]  # in the fork
    descriptors: Sequence[int]  # that it takes over: they are closed here
    lifeline: socket.socket

    @property
    def files(self) -> list[File]:
        return [*self.descriptors, self.lifeline]


class ForkServer:
    """Forks its single-threaded process for each request. Each fork leads a process group of its own.

    A fork is killed with its group when the other end of its lifeline is closed, or the requests end. Each byte sent
    over the lifeline is a signal number for the fork; the reply is its exit status, negative for a signal.
    """

    def __init__(
        self,
        source: socket.socket,
        accept: Callable[[], Request | None],
        *,
        most: int = sys.maxsize,
        kill_rest: bool = True,
        ended: Ended | None = None,
    ) -> None:
        """accept: reads a request from `source`; None: invalid. Raises EOFError at the end of the requests.

        most: concurrent forks. kill_rest: kill the remaining group of a fork that has ended by itself. ended: called
        with the pid of a fork, its status and its resource usage.
        """
        self._source, self._accept = source, accept
        self._most, self._kill_rest, self._ended = most, kill_rest, ended
        self._selector = selectors.PollSelector()  # epoll's list of files is the kernel's: forks would share it
        self._waiting: deque[Request] = deque()
        self._lifelines: dict[int, socket.socket | None] = {}  # by the fork, until it is reaped; None: it is killed

    def watch(self, file: File, call: Callable[[], object]) -> None:
        """Call `call` whenever the file is readable. Forks do not inherit the file."""
        self._selector.register(file, selectors.EVENT_READ, call)

    def forget(self, file: File) -> None:
        """Close a watched file."""
        self._selector.unregister(file)
        _close(file)

    def serve(self) -> None:
        """Serve until the requests end; then kill all forks."""
        gc.freeze()  # a collection in a fork would write to, and so copy, the memory of all that is loaded
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the selector wakes
        self.watch(woken, partial(os.read, woken, 1 << 16))
        self.watch(self._source, self._take)
        while self._source.fileno() >= 0:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # else an earlier call has closed the file
                    key.data()
            self._reap()
            while self._waiting and len(self._lifelines) < self._most:
                self._start(self._waiting.popleft(), wake)
        for process in self._lifelines:
            _kill(process)
        with suppress(ChildProcessError):
            while True:
                os.wait()

    def _take(self) -> None:
        try:
            request = self._accept()
        except EOFError:
            self.forget(self._source)
        else:
            self._waiting.extend([request] if request else [])

    def _start(self, request: Request, wake: int) -> None:
        try:
            process = os.fork()
        except OSError:  # the failure is this request's alone: its files are closed without an answer
            traceback.print_exc()
            for file in request.files:
                _close(file)
            return
        if process == 0:
            self._play(request, wake)
        for descriptor in request.descriptors:
            os.close(descriptor)
        self._lifelines[process] = request.lifeline
        self.watch(request.lifeline, partial(self._hear, process, request.lifeline))

    def _play(self, request: Request, wake: int) -> NoReturn:
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watched = [cast(File, key.fileobj) for key in self._selector.get_map().values()]
            waiting = [file for other in self._waiting for file in other.files]
            for file in (wake, request.lifeline, *watched, *waiting):
                _close(file)
            request.play()
            status = 0
        except BaseException:  # whatever it is, a fork must not become a second server
            traceback.print_exc()
        finally:
            os._exit(status)

    def _hear(self, process: int, lifeline: socket.socket) -> None:
        try:
            numbers = lifeline.recv(64)
        except OSError:
            numbers = b""
        for number in numbers:
            os.kill(process, number)
        if not numbers:
            self.forget(lifeline)
            self._lifelines[process] = None
            _kill(process)

    def _reap(self) -> None:
        """Reap ended children, including orphans of forks if this process is a subreaper (PR_SET_CHILD_SUBREAPER)."""
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                process = ended.si_pid
                if process in self._lifelines and self._kill_rest:
                    _kill(process)
                _, status, used = os.wait4(process, 0)
                if process in self._lifelines:
                    self._report_end(process, os.waitstatus_to_exitcode(status), used)

    def _report_end(self, process: int, status: int, used: resource.struct_rusage) -> None:
        if self._ended is not None:
            self._ended(process, status, used)
        if (lifeline := self._lifelines.pop(process)) is not None:
            with suppress(OSError):  # nothing listens any more
                lifeline.sendall(str(status).encode())
            self.forget(lifeline)


def received_files(control: socket.socket, count: int) -> list[int]:
    """Receive the file descriptors of a request, for `accept`; empty at this process's limit of open files."""
    mark, descriptors, _, _ = socket.recv_fds(control, 1, count)
    if not mark:
        raise EOFError
    if len(descriptors) == count:
        return descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return []


def end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has started it, ends."""
    if ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise OSError("prctl")
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _kill(process: int) -> None:
    """Kill a fork that is not reaped, and its group, which may not exist yet."""
    os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _close(file: File) -> None:
    if isinstance(file, int):
        os.close(file)
    else:
        file.close()
