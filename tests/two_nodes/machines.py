"""Two machines on this one, joined by a cable: namespaces of Linux, nothing simulated above them.

`in_a_rack` runs a module in a network, mount and process namespace of its own: the rack. In it, `Machine` is one more
mount and process namespace, and for all but the first a network namespace. A machine reads the code and the Python
environment, and writes only to its own memory: everything else is read-only, so nothing is shared by accident.

Nothing is left behind, also when this process is killed: its death kills the rack's first process, the kernel ends all
processes of a namespace with its first one, and mounts, interfaces and files in memory go with the last of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# Dies with its parent, and with it everything that runs inside.
_RACK = (
    "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
HOME = "/tmp/home"
_OWN_MEMORY = f"for folder in {' '.join(PRIVATE)}; do mount -t tmpfs tmpfs $folder; done"
# What libraries keep in the user's cache is copied if it is there: compiling DeepSpeed's operations takes most of a
# minute, and vLLM learns the features of a model in a process of its own.
_MACHINE = f"""
set -e
findmnt --real --raw --noheadings --output TARGET | while read -r target; do
  if [ -e "$target" ]; then mount -o remount,bind,ro "$target"; fi  # else the rack's own memory hides it
done
{_OWN_MEMORY}
mkdir -p {HOME}/.cache
for cache in torch_extensions vllm; do
  if [ -d "$USER_HOME/.cache/$cache" ]; then cp -a "$USER_HOME/.cache/$cache" {HOME}/.cache/; fi
done
echo isolated
read -r _
exec "$@"
"""


def obstacle() -> str:
    """Why this machine cannot be two; empty if it can."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "making namespaces and network interfaces needs root"
    missing = [program for program in ("ip", "unshare", "setpriv", "nsenter", "findmnt") if not shutil.which(program)]
    if missing:
        return f"these programs are missing: {', '.join(missing)} (Debian: iproute2, util-linux)"
    for folder in (Path(__file__).resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
        if hidden := next((private for private in PRIVATE if folder.is_relative_to(private)), None):
            return f"{folder} lies below {hidden}, which each machine has for itself"
    cable = ["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    done = subprocess.run([*_RACK, "sh", "-c", _MACHINE, "sh", *cable], input="\n", capture_output=True, text=True)
    return f"the kernel permits no namespaces here: {' '.join(done.stderr.split())}" if done.returncode else ""


def in_a_rack(module: str) -> Any:
    """Runs `python -m module FD` with empty temporary folders and no network; returns what it writes to FD as JSON."""
    reading, writing = os.pipe()
    python = [sys.executable, "-m", module, str(writing)]
    prepare = f'{_OWN_MEMORY}; ip link set lo up; exec "$@"'
    with os.fdopen(reading) as answer:
        process = subprocess.Popen([*_RACK, "sh", "-c", prepare, "sh", *python], pass_fds=[writing])
        try:
            os.close(writing)
            text = answer.read()
            if process.wait():
                raise RuntimeError(f"python -m {module} failed in its rack, see above")
            return json.loads(text)
        finally:
            process.kill()
            process.wait()


class Machine:
    """One, in the rack. Starts isolated, then waits for `run`."""

    def __init__(self, name: str, log: Path, *, own_network: bool) -> None:
        self.name = name
        self._log = log
        flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *(["--net"] if own_network else [])]
        self._command = ["unshare", *flags, "sh", "-c", _MACHINE, "sh"]
        self._process: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Isolate, and prepare `command`, which `run` lets begin."""
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*self._command, *command], env={**environment, "USER_HOME": environment["HOME"], "HOME": HOME},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "isolated\n":
            raise RuntimeError(f"{self.name} is not isolated: {self._log.read_text()}")

    def run(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Of its first process, as the rack numbers them."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children()[0].pid

    def processes(self, text: str) -> list[psutil.Process]:
        """Those whose command line has `text` in it."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # has ended meanwhile
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs `command` on the machine."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid"]
        return subprocess.run([*enter, *command], capture_output=True, text=True)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ends all its processes: they are those of its process namespace."""
        if self._process is not None:
            for first in psutil.Process(self._process.pid).children():  # none if it was never isolated
                first.kill()
            self._process.wait()


def connect(first: Machine, first_address: str, second: Machine, second_address: str) -> None:
    """A cable between the rack's own network, which is that of `first`, and `second`."""
    peer = ["peer", "name", "cable", "netns", str(second.pid)]
    for command in (
        ["ip", "link", "add", "cable", "type", "veth", *peer],
        ["ip", "address", "add", f"{first_address}/24", "dev", "cable"],
        ["ip", "link", "set", "cable", "up"],
    ):
        subprocess.run(command, check=True)
    for arguments in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{second_address}/24", "dev", "cable"],
        ["link", "set", "cable", "up"],
    ):
        done = second.inside("ip", *arguments)
        if done.returncode:
            raise RuntimeError(f"{second.name}: ip {' '.join(arguments)}: {done.stderr}")
