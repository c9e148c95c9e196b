"""The warm process: `python -m rlhf_core.warm.server SOCKET [LIBRARY …]` imports libraries once and forks at a request.

One thread, as a fork needs it. Our own code is imported too, and again by a fork that finds it changed. Libraries that
were installed again, or variables that they read when they are imported, would be others than a fresh process has: then
a request is refused, and its client starts a plain Python. For nodes without GPUs, since some of what is imported may
touch the driver, which no fork can use after that.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_core.warm.client import RUNNING
from rlhf_core.warm.preloading import LIBRARIES, our_files, preload
from rlhf_core.warm.program import Request, exit_after, run

# Read by libraries when they are imported, some once and for all.
_READ_AT_IMPORT = (
    "ACCELERATE_", "CUDA_", "DS_", "HF_", "LD_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_",
)  # fmt: skip
# Set again in the fork, or read when they are needed.
_FREE = frozenset({"HF_HUB_OFFLINE", "HF_TOKEN", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED"})
_REQUEST_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class Server:
    """Answers one request after another; `serve` returns only in the forks, with what they are to run."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        """environment: this process's as it was before anything was imported."""
        self._environment = _read_at_import(environment)
        self._site = _site_stamps()
        self._pid = os.getpid()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        path.chmod(0o600)
        self._listening.listen(64)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._clients: dict[int, socket.socket] = {}  # by the pid of the fork
        self._selector = selectors.DefaultSelector()
        for watched in (self._listening, self._woken):
            self._selector.register(watched, selectors.EVENT_READ)

    def serve(self) -> Request:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that the selector wakes
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.fileobj is self._listening:
                    connection, _ = self._listening.accept()
                    connection.settimeout(_REQUEST_SECONDS)
                    if (request := self._answer(connection)) is not None:
                        return request
                elif key.data in self._clients:
                    self._hear(key.data)
            self._reap()

    def _answer(self, connection: socket.socket) -> Request | None:
        """Forks if the request can be served; it is returned in the fork only."""
        try:
            request = _received(connection)
        except (OSError, ValueError, KeyError) as error:
            print(f"no request: {error}", flush=True)
            connection.close()
            return None
        # While we were suspended it has not waited for us, and has started a plain Python.
        why = "its client has hung up" if _has_hung_up(connection) else self._why_not(request)
        pid = 0 if why else os.fork()
        if not why and pid == 0:
            self._leave()
            try:
                connection.sendall(RUNNING)
            except OSError:  # it has hung up since
                os._exit(1)
            return request
        for descriptor in request.descriptors:
            os.close(descriptor)
        if why:
            with suppress(OSError):
                connection.sendall(why.encode())
            connection.close()
        else:
            self._clients[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _why_not(self, request: Request) -> str:
        """Why a fork would not be what a fresh process is; empty if it would be."""
        wanted = _read_at_import(request.environment)
        if differing := sorted(
            n for n in wanted.keys() | self._environment if wanted.get(n) != self._environment.get(n)
        ):
            return f"it was started with other values of {', '.join(differing)}"
        if _site_stamps() != self._site:
            return "packages were installed since it was started"
        return ""

    def _hear(self, pid: int) -> None:
        """A client passes signals on, one byte each; one that is gone takes its program along."""
        try:
            numbers = self._clients[pid].recv(64)
        except OSError:
            numbers = b""
        try:
            if not numbers:
                self._forget(pid)
                os.killpg(pid, signal.SIGKILL)
            for number in numbers:
                os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has ended by itself, or has not made its group yet and is about to see that its client hung up

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            print(f"{pid} ended ({status}) after {used.ru_utime + used.ru_stime:.2f} s of processor time", flush=True)
            if (client := self._clients.get(pid)) is not None:
                with suppress(OSError):  # where the client was killed meanwhile
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        client = self._clients.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _leave(self) -> None:
        """In a fork: give up what belongs to the warm process."""
        os.setsid()  # its own group, which is killed with its client
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for opened in (self._listening, self._woken, self._waker, *self._clients.values()):
            opened.close()


def _received(connection: socket.socket) -> Request:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise ValueError(f"it comes from user {uid}")
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    try:
        size = int.from_bytes(header, "big")
        content = bytearray()
        while len(content) < size:
            if not (more := connection.recv(size - len(content))):
                raise ValueError("it is cut off")
            content += more
        asked = json.loads(content)
        return Request(asked["arguments"], asked["folder"], asked["environment"], asked["umask"], descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _has_hung_up(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_REQUEST_SECONDS)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if n.startswith(_READ_AT_IMPORT) and n not in _FREE}


def _site_stamps() -> dict[str, int]:
    """When packages were last installed or removed."""
    folders = (Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return {str(folder): folder.stat().st_mtime_ns for folder in folders if folder.is_dir()}


def main(arguments: list[str]) -> None:
    path, *libraries = arguments
    environment = dict(os.environ)
    added = [str(Path.cwd()), *environment.get("PYTHONPATH", "").split(":")]
    base_path = [entry for entry in sys.path if entry not in added]
    Path(path).unlink(missing_ok=True)  # a predecessor's: until we listen, clients need not try
    files = our_files()
    try:
        preload(libraries or LIBRARIES)
    except RuntimeError as error:
        print(f"not serving, programs start as plain Pythons: {error}", flush=True)
        signal.pause()  # a supervisor would start it again, and import all that for ever
    server = Server(Path(path), environment)
    print("ready", flush=True)
    request = server.serve()
    exit_after(lambda: run(request, base_path, files))


if __name__ == "__main__":
    main(sys.argv[1:])
