"""Commands in a sandbox: each runs in namespaces of its own, below a keeper (keeper.py).

The first process of a command's namespaces starts bash and reaps orphans. When it ends, or is killed, the kernel kills
all others, so that no process of a command outlives it. Started by runtimes/sandbox.py as a file.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])  # where our code is, for these files alone
from rlhf_core.errors import reason_of
from rlhf_core.processes.keeper import drop_privileges, few_files, host, set_filter
from rlhf_core.processes.namespaces import enter, give, leave_user

if __name__ == "__main__":
    sys.path.pop(0)

_LOOK_SECONDS = 0.05  # between looks at the limits
_LOOKS_PER_COUNT = 5  # of files
_MOST_OPEN = 1024
_SET_DEATH_SIGNAL = 1  # of prctl
_PROBE_SECONDS = 30.0
_PROBE = """
test "$(id -u)" = 0 || echo "it is not root in its own namespace"
test "$$" -lt 9 || echo "it sees processes of the node"
test -w /app -a ! -w /usr || echo "it could write to the system's programs"
test ! -w /proc/sys/kernel/core_pattern || echo "it could write the kernel's settings"
test ! -e NODE || echo "it could see the node's files"
kill -0 PID 2> /dev/null && echo "it could send a signal to a process of the node"
ip_count=$(grep -c : /proc/net/dev)
test "$ip_count" = 1 || echo "it has $ip_count network interfaces"
mount -t tmpfs x /tmp 2> /dev/null && echo "it could mount"
unshare -U true 2> /dev/null && echo "it could make a namespace"
echo 1 > /app/own || echo "it could not write a file"
"""


def main() -> None:
    host(_answer, _fault)


def _answer(
    connection: socket.socket,
    settings: dict[str, Any],
    *,
    root: str,
    command: str,
    folder: str,
    variables: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """Return the output of a command and its end: its exit status, or the limit that stopped it."""
    pipe, written = os.pipe()
    faults, fault = os.pipe()
    gone, _alive = os.pipe()  # closed when this keeper ends
    leave_user()
    process = os.fork()
    if process == 0:
        os.close(_alive)
        _run(settings, root, folder, command, variables, written, fault, gone)
    for descriptor in (written, fault, gone):
        os.close(descriptor)
    watch = _Watch(connection, process, pipe, root, settings)
    stopped = watch.until(time.monotonic() + seconds)
    if stopped:
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])  # when all that it has started are reaped
    watch.drain()
    with open(faults, errors="replace") as file:
        if problem := file.read():
            return {"fault": problem}
    return {"output": watch.output.decode("utf-8", "replace"), "cut": watch.cut, "stopped": stopped, "status": status}


class _Watch:
    """The output of a command's processes, and their limits."""

    def __init__(self, connection: socket.socket, process: int, pipe: int, root: str, settings: dict[str, Any]) -> None:
        self._connection, self._process, self._pipe, self._root = connection, process, pipe, root
        self._settings = settings
        self._ended = os.pidfd_open(process)
        self.output = b""
        self.cut = False  # there was more of it

    def until(self, deadline: float) -> str:
        """Read the output until the command has ended or a limit is exceeded; return that limit."""
        poll = select.poll()
        for descriptor in (self._connection.fileno(), self._pipe, self._ended):
            poll.register(descriptor, select.POLLIN)
        looked, looks = time.monotonic(), 0
        while True:
            readable = {descriptor for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS)}
            if self._connection.fileno() in readable:
                return "gone"  # the caller
            if self._pipe in readable and not self._read():
                poll.unregister(self._pipe)
            if self._ended in readable:
                return "" if self._within_files() else "files"
            now = time.monotonic()
            if now > deadline:
                return "time"
            if now - looked < _LOOK_SECONDS:
                continue
            looked, looks = now, looks + 1
            if self._uses_too_much_memory():
                return "memory"
            if looks % _LOOKS_PER_COUNT == 0 and not self._within_files():
                return "files"

    def drain(self) -> None:
        """Read what is left, once no process has the pipe open."""
        while self._read():
            pass

    def _read(self) -> bool:
        printed = os.read(self._pipe, 1 << 16)
        room = self._settings["output"] - len(self.output)
        self.output += printed[:room]
        self.cut |= len(printed) > room
        return bool(printed)

    def _within_files(self) -> bool:
        return few_files(self._root, self._settings["files"], self._settings["disk"])

    def _uses_too_much_memory(self) -> bool:
        size, pending = 0, [self._process]
        while pending:
            process = pending.pop()
            with suppress(OSError, IndexError, ValueError):  # it has ended since
                with open(f"/proc/{process}/status") as file:  # without files, whose pages all may share
                    size += sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
                for thread in os.listdir(f"/proc/{process}/task"):
                    with open(f"/proc/{process}/task/{thread}/children") as file:
                        pending += map(int, file.read().split())
        memory: int = self._settings["memory"]
        return 1024 * size > memory


def _run(
    settings: dict[str, Any],
    root: str,
    folder: str,
    command: str,
    variables: dict[str, str],
    output: int,
    fault: int,
    gone: int,
) -> None:
    """Run the command, as the first process of its namespaces, and never return."""
    status = 1
    try:
        _end_with(gone)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(fault, 3, inheritable=False)
        os.dup2(gone, 4)
        os.closerange(5, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        enter(root, settings["readable"])
        _end_with(4)  # the change of the user has revoked it
        worker = os.fork()
        if worker == 0:
            _start(settings, folder, command, variables)
        drop_privileges()
        os.closerange(0, 5)
        status = _status_of(worker)
    except BaseException as error:  # whatever it is, a fork must not become a second keeper
        with suppress(OSError):
            os.write(3, f"{type(error).__name__}: {reason_of(error)}".encode()[:1000])
    finally:
        os._exit(status)


def _end_with(gone: int) -> None:
    """Have the kernel kill this process when its parent ends. gone: a pipe that the parent alone can write."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if select.select([gone], [], [], 0)[0]:
        os._exit(1)  # it has ended before the kernel was asked


def _start(settings: dict[str, Any], folder: str, command: str, variables: dict[str, str]) -> None:
    """Become the shell of the command. Raises OSError if that is not possible."""
    os.setsid()
    os.umask(0o022)
    os.nice(10)  # the job, and keepers with their limits, go first
    for kind, most in (
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, settings["disk"]), (resource.RLIMIT_NOFILE, _MOST_OPEN),
        (resource.RLIMIT_NPROC, settings["tasks"]), (resource.RLIMIT_DATA, settings["memory"]),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    if not os.path.isdir(folder):  # a command may have removed its own
        os.makedirs(folder)
    os.chdir(folder)
    drop_privileges()
    set_filter(settings["filter"])
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.execve("/bin/bash", ["bash", "-c", command], settings["variables"] | variables)  # noqa: S606


def _status_of(worker: int) -> int:
    """Reap all processes until the worker ends; return its exit status, as a shell has it."""
    while True:
        process, status = os.wait()
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _fault(settings: dict[str, Any]) -> str:
    """Return a fault of the confinement, an action wrongly possible or impossible; empty if there is none."""
    root = tempfile.mkdtemp(dir=settings["folder"])
    give(folder := os.open(root, os.O_RDONLY))
    os.close(folder)
    theirs, ours = socket.socketpair()
    reader, writer = os.pipe()
    process = os.fork()  # a keeper changes its user for ever
    if process == 0:
        try:
            ours.close()
            probe = _PROBE.replace("NODE", settings["folder"]).replace("PID", str(os.getppid()))
            ended = _answer(
                theirs, settings, root=root, command=probe, folder="/app", variables={}, seconds=_PROBE_SECONDS
            )
            why = f"the probe was stopped: {ended['stopped']}" if ended.get("stopped") else ended.get("output", "")
            os.write(writer, (ended.get("fault") or why).encode()[:1000])
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {reason_of(error)}".encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, errors="replace") as file:
        problem = file.read().strip()
    os.waitpid(process, 0)
    theirs.close()
    ours.close()
    shutil.rmtree(root, ignore_errors=True)
    return problem.splitlines()[0] if problem else ""


if __name__ == "__main__":
    main()
