"""Run a program as a job of the local stack without GPUs: `python -m benchmarks.as_shipped MODULE …`.

MODULE, and the actors that it starts, are forks of a warm process and share the memory of its libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlhf_core.warm.client import SOCKET_VARIABLE, exit_with, run_warm

_START_SECONDS = 120.0


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        socket = Path(folder) / "warm.sock"
        server = subprocess.Popen([sys.executable, "-m", "rlhf_core.warm.server", str(socket)])
        try:
            _wait_for(socket, server)
            os.environ[SOCKET_VARIABLE] = str(socket)
            status = run_warm(["-m", *arguments])
        finally:
            server.terminate()
            server.wait()
    if status is None:
        raise RuntimeError("the warm process has refused: its reason is above")
    return status


def _wait_for(socket: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not socket.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the warm process did not start: its output is above")
        time.sleep(0.1)


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
