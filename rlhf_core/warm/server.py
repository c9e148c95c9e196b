"""The warm process: it imports libraries once, and forks on request.

Usage: `python -m rlhf_core.warm.server SOCKET [LIBRARY …]`

Our own code is imported too, and again by a fork if it has changed. If libraries were installed again, or variables
that they read on import differ, a request is refused, and its client starts a plain Python. For nodes without GPUs,
since some imports may initialise the driver, which no fork can use after that.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rlhf_core.processes.fork_server import ForkServer, Request, end_with
from rlhf_core.warm.client import RUNNING
from rlhf_core.warm.preloading import LIBRARIES, our_files, preload
from rlhf_core.warm.program import Program, exit_after, run

# Read by libraries when they are imported, some once and for all.
_READ_AT_IMPORT = (
    "ACCELERATE_", "CUDA_", "DS_", "HF_", "LD_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_",
)  # fmt: skip
# Set again in the fork, or read when they are needed.
_FREE = frozenset({"HF_HUB_OFFLINE", "HF_TOKEN", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED"})
_REQUEST_SECONDS = 5.0


class Server:
    """Serves one request after another."""

    def __init__(
        self, path: Path, environment: Mapping[str, str], base_path: Sequence[str], our_files: Mapping[str, int]
    ) -> None:
        """environment: of this process, before anything was imported. base_path, our_files: see `run`."""
        self._environment = _read_at_import(environment)
        self._site = _site_stamps()
        self._pid = os.getpid()
        self._base_path, self._our_files = base_path, our_files
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        path.chmod(0o600)
        self._listening.listen(64)

    def serve(self) -> None:
        # As with a plain Python, descendants may outlive a program: multiprocessing's tracker cleans up after it.
        ForkServer(self._listening, self._accept, kill_rest=False, ended=_log).serve()

    def _accept(self) -> Request | None:
        connection, _ = self._listening.accept()
        connection.settimeout(_REQUEST_SECONDS)
        try:
            request = _received(connection)
        except (OSError, ValueError, KeyError) as error:
            print(f"no request: {error}", flush=True)
            connection.close()
            return None
        why = self._why_not(request)
        try:
            # While we were suspended its client has perhaps not waited for us, and has started a plain Python.
            connection.sendall(why.encode() if why else RUNNING)
        except OSError:
            why = "its client has hung up"
        if not why:
            return Request(partial(self._play, request), request.descriptors, connection)
        for descriptor in request.descriptors:
            os.close(descriptor)
        connection.close()
        return None

    def _play(self, program: Program) -> None:
        end_with(self._pid)
        exit_after(partial(run, program, self._base_path, self._our_files))

    def _why_not(self, request: Program) -> str:
        """Return why a fork would differ from a fresh process; empty if it would not."""
        wanted = _read_at_import(request.environment)
        if differing := sorted(
            n for n in wanted.keys() | self._environment if wanted.get(n) != self._environment.get(n)
        ):
            return f"it was started with other values of {', '.join(differing)}"
        if _site_stamps() != self._site:
            return "packages were installed since it was started"
        return ""


def _log(process: int, status: int, used: resource.struct_rusage) -> None:
    print(f"{process} ended ({status}) after {used.ru_utime + used.ru_stime:.2f} s of processor time", flush=True)


def _received(connection: socket.socket) -> Program:
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
        request = json.loads(content)
        return Program(request["arguments"], request["folder"], request["environment"], request["umask"], descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if n.startswith(_READ_AT_IMPORT) and n not in _FREE}


def _site_stamps() -> dict[str, int]:
    """Return the times of the last installation or removal of packages."""
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
    server = Server(Path(path), environment, base_path, files)
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
