"""Runs pieces of Python code in processes that can neither read, write, connect nor outlive what they are given."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.artifacts.scratch import new_folder, remove
from rlhf_core.environments.seccomp import seccomp_filter
from rlhf_core.errors import EpisodeError, StageError

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
# Beside the Python installation: what its libraries are linked with, and what every program may read.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# All variables of the process: none of the job's. One thread: a library's threads would not be there in a fork.
_VARIABLES = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1", "HOME": "/nonexistent", "TZ": "UTC",
}  # fmt: skip
_MOST_CODE = 2**20  # characters
_LONGEST_ANSWER = 2**20  # bytes
_LOADING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a piece of code."""

    output: str  # what it printed, with its traceback
    stopped: str  # why it was killed: time, output or files; empty: it ended by itself
    status: int  # its exit status, 0 if it raised nothing


class Sandbox:
    """A process that has loaded `modules`, and forks for each piece of code. Needs Linux 5.13 or later."""

    def __init__(self, seconds: float, memory_gib: float, modules: Sequence[str] = ()) -> None:
        """seconds, memory_gib: that each piece of code may take. modules: loaded once, for all of them.

        Raises StageError if this node cannot confine it, or a module cannot be loaded.
        """
        self._folder = new_folder("python-tool")
        self._control, theirs = socket.socketpair()
        settings = {
            "folder": str(self._folder), "seconds": seconds, "memory": int(memory_gib * 2**30), "modules": modules,
            "processes": len(os.sched_getaffinity(0)), "readable": _readable(),
            "filter": base64.b64encode(seccomp_filter()).decode(),
        }  # fmt: skip
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, env=_VARIABLES, cwd=self._folder, start_new_session=True,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        try:
            self._start(settings)
        except StageError:
            self.close()
            raise

    def _start(self, settings: dict[str, object]) -> None:
        self._control.settimeout(_LOADING_SECONDS)
        try:
            self._control.sendall(json.dumps(settings).encode() + b"\n")
            with self._control.makefile("r") as lines:
                answer = json.loads(lines.readline() or '{"error": "its process ended; see the log"}')
        except OSError as error:
            answer = {"error": f"it did not start ({error})"}
        self._control.settimeout(None)
        if "error" in answer:
            raise StageError(
                f"this node cannot run the code of the Python tool confined ({answer['error']}): it needs Linux 5.13 "
                "or later with Landlock and seccomp, and what `modules` names; use another node, or leave the tool out"
            )

    async def run(self, code: str) -> Ran:
        """Raises EpisodeError if the process that runs it has ended."""
        if len(code) > _MOST_CODE:
            return Ran(f"the code has more than {_MOST_CODE} characters", "", 1)
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_ANSWER)
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                writer.write(json.dumps({"code": code}).encode() + b"\n")
                await writer.drain()
                theirs.close()  # else its end would not be seen
                return Ran(**json.loads(await reader.readuntil(b"\n")))
            except (OSError, asyncio.IncompleteReadError) as error:
                raise EpisodeError("the process that runs code of the Python tool has ended; see the log") from error
            finally:
                writer.close()

    def close(self) -> None:
        """End it, with all code that runs."""
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove(self._folder)


def _readable() -> list[str]:
    """The Python installation and its packages; not folders of a checkout, which may have files of the user's."""
    installed = {sysconfig.get_path(scheme) for scheme in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages", "lib-dynload")}
    found = [*sorted(installed), *_LIBRARIES, *_DEVICES]
    return [path for path in found if os.path.exists(path)]
