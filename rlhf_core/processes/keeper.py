"""The host of a sandbox: each call gets a keeper, a fork of the host, which runs what is confined in a fork of its own.

The host imports only the standard library, has none of the job's environment variables, and never reads a request or a
reply, so that a fork has nothing to leak. Started by sandbox.py, with the control socket of a ForkServer.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from rlhf_core.errors import reason_of
from rlhf_core.processes.fork_server import ForkServer, Request, end_with, received_files
from rlhf_core.processes.lines import open_pipes

MOST_FILES, MOST_FILE_BYTES = 1000, 64 * 2**20  # of a piece of code

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER, _SET_SUBREAPER = 38, 22, 2, 36  # of prctl


class _SeccompProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def host(answer: Callable[..., dict[str, Any]], fault: Callable[[dict[str, Any]], str]) -> None:
    """Be the host of a sandbox, until its control socket is closed.

    answer: called in the keeper of each call, as answer(connection, settings, **request). fault: returns a fault of the
    confinement, found before the first call; empty if there is none.
    """
    requests, replies = open_pipes()
    settings = json.loads(requests.readline())
    settings["filter"] = base64.b64decode(settings["filter"])
    try:
        for module in settings["modules"]:
            import_module(module)
        problem = fault(settings)
    except Exception as error:
        problem = f"{type(error).__name__}: {reason_of(error)}"
    with requests, replies:
        replies.write(json.dumps({"error": problem} if problem else {"ready": True}) + "\n")
    if not problem:
        _serve(socket.socket(fileno=int(sys.argv[1])), settings, answer)


def _serve(control: socket.socket, settings: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """Pass each call unread to a fork, its keeper: no keeper has seen another call."""
    call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)  # of code whose keeper was killed
    host = os.getpid()

    def accept() -> Request | None:
        files = received_files(control, 2)
        if not files:
            return None
        keep = partial(_keep, files[0], settings, host, answer)
        return Request(keep, files[:1], socket.socket(fileno=files[1]))

    ForkServer(control, accept, most=settings["processes"]).serve()


def _keep(descriptor: int, settings: dict[str, Any], host: int, answer: Callable[..., dict[str, Any]]) -> None:
    """Serve one call, in a fork of the host, from its request to its reply."""
    end_with(host)
    os.dup2(descriptor, 3)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    connection = socket.socket(fileno=3)
    with connection.makefile("r") as lines:
        line = lines.readline()
    if line.endswith("\n"):  # else the caller has gone
        reply = json.dumps(answer(connection, settings, **json.loads(line)))
        with suppress(BrokenPipeError):
            connection.sendall(reply.encode() + b"\n")


def few_files(folder: str, left: int = MOST_FILES, most_bytes: int = MOST_FILE_BYTES) -> bool:
    """Return whether the folder has at most `left` files of `most_bytes` together; False if they cannot be counted
    (paths too long).
    """
    size, pending = 0, [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    left -= 1
                    with suppress(FileNotFoundError):  # removed since
                        size += entry.stat(follow_symlinks=False).st_size
                    if left < 0 or size > most_bytes:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed since
        except OSError:
            return False
    return True


def drop_privileges() -> None:
    """Drop all capabilities, if the job runs as root, and regain none by starting a program."""
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def set_filter(program: bytes) -> None:
    """Filter all further system calls of this process by `program` (seccomp.py)."""
    call("prctl", _SET_SECCOMP, _FILTER, ctypes.byref(_SeccompProgram(len(program) // 8, program)), 0, 0)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library, with the kernel's errors. Raises OSError."""
    result: int = getattr(_LIBC, name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}({', '.join(map(str, arguments[:1]))}): {os.strerror(error)}")
    return result
