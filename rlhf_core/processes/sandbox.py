"""Sandbox for pieces of Python code: their processes are confined in files, network, memory, time and lifetime."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhf_core
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.processes.forked import ForkedProcess
from rlhf_core.processes.lines import LineProcess, ProcessError
from rlhf_core.processes.seccomp import seccomp_filter
from rlhf_core.system.scratch import new_folder, remove, remove_tree

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
_HOME = str(Path(rlhf_core.__file__).parents[1])
# Beside the Python installation: libraries that it is linked with, and files that every program may read.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# All variables of the process: none of the job's. One thread: a library's threads would not be there in a fork.
_VARIABLES = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1", "HOME": "/nonexistent", "TZ": "UTC",
}  # fmt: skip
_MOST_CODE = 2**20  # characters
_LOADING_SECONDS = 60.0
_REFUSAL = (
    "this node cannot run the policy's code confined ({fault}): it needs Linux 5.13 or later with Landlock and "
    "seccomp, and what `modules` names; use another node, or leave out what runs code"
)


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The result of a piece of code."""

    output: str  # its output, with its traceback
    stopped: str  # why it was killed: time, output or files; empty: it ended by itself
    status: int  # its exit status, 0 if it raised nothing


@dataclass(frozen=True, slots=True)
class _Host:
    process: LineProcess
    control: socket.socket

    def end(self) -> None:
        self.control.close()
        self.process.close(after_seconds=5.0)


class SandboxHost:
    """The process of a sandbox, which forks a keeper for each call."""

    def __init__(self, program: Path, settings: Mapping[str, Any], refusal: str) -> None:
        """program: a file that calls `sandbox_process.host`. settings: of all calls. refusal: why a node is refused,
        with a {fault}.

        Raises StageError if this node cannot confine what the sandbox runs.
        """
        self._program, self._settings, self._refusal = program, settings, refusal
        self.folder = new_folder("sandbox")
        self._starting = threading.Lock()
        try:
            self._host = self._started()
        except StageError:
            remove(self.folder)
            raise

    def _started(self) -> _Host:
        control, host_end = socket.socketpair()
        with host_end:
            arguments = ["-s", "-B", str(self._program), str(host_end.fileno()), _HOME]
            process = LineProcess(
                arguments, environment=_VARIABLES, folder=self.folder, descriptors=[host_end.fileno()]
            )
        host = _Host(process, control)
        try:
            answer = process.exchange({"folder": str(self.folder), **self._settings}, _LOADING_SECONDS)
        except TimeoutError:
            answer = {"error": f"it did not start within {_LOADING_SECONDS:g} s"}
        except ProcessError as error:
            answer = {"error": f"its process {error}; see the log"}
        if "error" in answer:
            host.end()
            raise StageError(self._refusal.format(fault=answer["error"]))
        return host

    def _start_again(self) -> None:
        with self._starting:
            status = self._host.process.status()
            if status is None:
                return  # another call has done it
            print(f"the host of the sandbox has ended ({status}): it is started again", file=sys.stderr)
            self._host.control.close()
            self._host = self._started()  # the last one is closed when no call has it any more

    async def started(self) -> None:
        """Start the host again if it has ended. Raises StageError if that is not possible."""
        if self._host.process.status() is not None:
            await asyncio.to_thread(self._start_again)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of a new keeper. Then it has ended, with all that it has started.

        Raises ProcessError if the keeper dies.
        """
        process = ForkedProcess(self._host.control)
        try:
            await process.begin()
            await process.send(request)
            answer: dict[str, Any] = await process.receive()
            return answer
        finally:
            await process.finish()
            process.close()

    def close(self) -> None:
        """Kill the host, and all that it runs."""
        self._host.end()
        remove(self.folder)


class Sandbox:
    """A host process that has loaded `modules`, and forks for each piece of code. Needs Linux 5.13 or later."""

    def __init__(self, seconds: float, memory_gib: float, modules: Sequence[str] = ()) -> None:
        """seconds, memory_gib: limits of each piece of code. modules: loaded once, for all of them.

        Raises StageError if this node cannot confine the code, or a module cannot be loaded.
        """
        settings = {
            "seconds": seconds, "memory": int(memory_gib * 2**30), "modules": modules,
            "processes": len(os.sched_getaffinity(0)), "readable": _readable(),
            "filter": base64.b64encode(seccomp_filter()).decode(),
        }  # fmt: skip
        self._host = SandboxHost(_PROGRAM, settings, _REFUSAL)

    async def run(self, code: str) -> CodeResult:
        """Run a piece of code.

        Raises EpisodeError if one of its processes has died; StageError if no new host can be started.
        """
        if len(code) > _MOST_CODE:
            return CodeResult(f"the code has more than {_MOST_CODE} characters", "", 1)
        await self._host.started()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._host.folder))
        except OSError as error:
            raise EpisodeError(f"there can be no folder for the policy's code: {error}") from error
        try:
            return CodeResult(**await self._host.ask({"folder": str(folder), "code": code}))
        except ProcessError as error:
            raise EpisodeError(f"the process that runs the policy's code has ended: it {error}; see the log") from error
        finally:
            await asyncio.to_thread(remove_tree, folder)  # no process is left that could write into it

    def close(self) -> None:
        """Kill the host, and all running code."""
        self._host.close()


def _readable() -> list[str]:
    """List the Python installation and its packages, without folders of a checkout, which may hold the user's files."""
    installed = {sysconfig.get_path(scheme) for scheme in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages", "lib-dynload")}
    paths = [*sorted(installed), *_LIBRARIES, *_DEVICES]
    return [path for path in paths if os.path.exists(path)]
