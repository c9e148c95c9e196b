"""Pieces of Python code in a sandbox: each runs in a fork of its keeper (keeper.py).

The code's process confines itself before it runs any: it can read the Python installation and its own empty folder,
write in that folder, compute, and do nothing else. Landlock (files), seccomp (everything else) and resource limits are
the kernel's, and need no privileges. Started by sandbox.py as a file.
"""

from __future__ import annotations

import ast
import ctypes
import io
import linecache
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])  # where our code is, for these two files alone
from rlhf_core.processes.fork_server import end_with
from rlhf_core.processes.keeper import MOST_FILE_BYTES, call, drop_privileges, few_files, host, set_filter

if __name__ == "__main__":
    sys.path.pop(0)

MOST_OUTPUT = 64 * 1024  # bytes
_LOOK_SECONDS = 0.05  # between looks at deadlines and files
_NAME = "<code>"

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, alike on all architectures
# Rights of Landlock: how many there are in each version of it, and those that are given.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_WRITE_FILE, _REMOVE_FOLDER, _REMOVE_FILE, _MAKE_FOLDER, _MAKE_FILE = 1 << 1, 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OWN = _READ_FILE | _READ_FOLDER | _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int)]


def main() -> None:
    host(_answer, _unconfined)


def _answer(connection: socket.socket, settings: dict[str, Any], folder: str, code: str) -> dict[str, Any]:
    """Return the output of the code, and its end: its exit status, or the limit that stopped it."""
    keeper = os.getpid()
    pipe, written = os.pipe()
    process = os.fork()
    if process == 0:
        _confined(settings, folder, written, code, keeper)
    os.close(written)
    output, stopped = _watched(connection.fileno(), pipe, folder, time.monotonic() + settings["seconds"])
    status = _ended(process, 0.0 if stopped else _LOOK_SECONDS)
    return {"output": output.decode("utf-8", "replace"), "stopped": stopped, "status": status}


def _watched(connection: int, pipe: int, folder: str, deadline: float) -> tuple[bytes, str]:
    """Read the output until it is closed or a limit is exceeded; return it with that limit."""
    output = b""
    poll = select.poll()
    for descriptor in (connection, pipe):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS):
            if descriptor == connection:
                return output, "gone"  # the caller
            printed = os.read(pipe, 1 << 16)
            output += printed
            if len(output) > MOST_OUTPUT:
                return output[:MOST_OUTPUT], "output"
            if not printed:
                return output, ""
        if time.monotonic() > deadline:
            return output, "time"
        if not few_files(folder):
            return output, "files"


def _ended(process: int, seconds: float) -> int:
    """Return the exit status. Code that closed its output and runs on is killed after `seconds`."""
    deadline = time.monotonic() + seconds
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended:
        if time.monotonic() >= deadline:
            os.kill(process, signal.SIGKILL)  # not reaped before: no other process can have its id
            ended, status = os.waitpid(process, 0)
        else:
            time.sleep(0.001)
            ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status)


def _confined(settings: dict[str, Any], folder: str, output: int, code: str, keeper: int) -> None:
    """Run the code in a fork of `keeper`, and never return."""
    status = 1
    try:
        end_with(keeper)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        # New ones: those of the host were opened on another file.
        sys.stdout, sys.stderr = _text_output(1), _text_output(2)
        os.chdir(folder)
        _confine(settings, folder)
        status = _run(code)
    except BaseException:  # whatever it is, a fork must not become a second host
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


def _text_output(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def _run(code: str) -> int:
    """Run the code as a notebook runs a cell: the value of a last expression is printed."""
    lines = [line + "\n" for line in code.splitlines()]
    linecache.cache[_NAME] = (len(code), None, lines, _NAME)  # tracebacks show its lines
    names: dict[str, Any] = {"__name__": "__main__"}
    random.seed(0)  # random numbers repeat
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, _NAME, "exec"), names)  # noqa: S102  running it is what this is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)  # noqa: S307
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        return 0 if error.code is None else 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _confine(settings: dict[str, Any], folder: str) -> None:
    """Confine this process. Raises OSError if the kernel cannot."""
    os.setsid()
    os.umask(0o077)
    with open("/proc/self/statm") as statistics:
        taken = int(statistics.read().split()[0]) * resource.getpagesize()
    seconds = int(settings["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, taken + settings["memory"]), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    drop_privileges()
    _restrict_files(settings["readable"], folder)
    set_filter(settings["filter"])


def _restrict_files(readable: list[str], folder: str) -> None:
    version = call("syscall", _CREATE_RULESET, None, 0, 1)
    handled = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # Files; from version 4 on TCP, from version 6 on sockets without a file and signals. seccomp denies these too.
    ruleset = (ctypes.c_uint64 * 3)(handled, 3, 3)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = call("syscall", _CREATE_RULESET, ruleset, size, 0)
    rights = _OWN | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    _allow(rules, folder, rights)
    for path in readable:
        _allow(rules, path, _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0))
    call("syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    below = os.open(path, os.O_PATH | os.O_CLOEXEC)
    call("syscall", _ADD_RULE, rules, 1, ctypes.byref(_PathRule(rights, below)), 0)
    os.close(below)


_PROBE = """
import ctypes, fcntl, os, signal, socket
libc = ctypes.CDLL(None)
def system(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(name)
def refused(name, function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return
    print(f"it could {name}")
refused("read a file outside of its folder", open, PATH)
refused("list a folder outside of its own", os.listdir, "/")
refused("write outside of its folder", open, os.path.join(os.path.dirname(os.getcwd()), "outside"), "w")
refused("open a socket", socket.socket)
refused("start a process", os.fork)
refused("send a signal", os.kill, os.getpid(), 0)
for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, 15, fcntl.F_NOTIFY, fcntl.F_SETLEASE):
    refused("have the kernel send a signal", fcntl.fcntl, 1, command, 0)
refused("have the kernel send a signal", fcntl.fcntl, 1, fcntl.F_SETFL, os.O_ASYNC)
for command in (0x5452, 0x8901, 0x8902):
    refused("have the kernel send a signal", fcntl.ioctl, 1, command, bytes(4))
refused("have the kernel send a signal", signal.setitimer, signal.ITIMER_REAL, 0)
refused("have the kernel send a signal", system, "prctl", 1, 0, 0, 0, 0)
refused("make a set-uid file", os.open, "set-uid", os.O_CREAT, 0o4700)
refused("hide a folder", os.mkdir, "hidden", 0)
refused("hide folders", os.umask, 0o777)
with open("own", "w") as file:
    file.write("1")
"""


def _unconfined(settings: dict[str, Any]) -> str:
    """Return a fault of the confinement, an action wrongly possible or impossible; empty if there is none."""
    folder = tempfile.mkdtemp(dir=settings["folder"])
    outside = os.path.join(settings["folder"], "probe")
    open(outside, "w").close()
    pipe, written = os.pipe()
    host, process = os.getpid(), os.fork()
    if process == 0:
        _confined(settings, folder, written, _PROBE.replace("PATH", repr(outside)), host)
    os.close(written)
    with open(pipe, errors="replace") as output:
        report = output.read().strip()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    shutil.rmtree(folder, ignore_errors=True)
    os.unlink(outside)
    return report.splitlines()[0] if report else "" if status == 0 else f"its process ended with exit code {status}"


if __name__ == "__main__":
    main()
