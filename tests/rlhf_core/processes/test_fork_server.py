"""Forks of a server: each has its own files alone, and ends with all that it has started."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from rlhf_core.processes.forked import ForkedProcess
from rlhf_core.processes.lines import LineProcess

pytestmark = pytest.mark.parts

# A fork says what it has open and what it has started, and ends at the first byte that it gets.
SERVER = """
import json, os, socket, subprocess, sys
from rlhf_core.processes.fork_server import ForkServer, Request, received_files

control = socket.socket(fileno=int(sys.argv[1]))

def accept():
    connection, lifeline = received_files(control, 2)
    return Request(lambda: play(socket.socket(fileno=connection)), [connection], socket.socket(fileno=lifeline))

def play(connection):
    started = subprocess.Popen(["sleep", "600"]).pid
    said = {"files": len(os.listdir("/proc/self/fd")), "processes": [os.getpid(), started]}
    connection.sendall(json.dumps(said).encode() + b"\\n")
    connection.recv(1)

ForkServer(control, accept).serve()
"""


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, LineProcess]]:
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        closing(LineProcess(["-c", SERVER, str(theirs.fileno())], descriptors=[theirs.fileno()])) as server,
    ):
        theirs.close()
        yield ours, server


async def begun(control: socket.socket) -> tuple[ForkedProcess, int, list[psutil.Process]]:
    """A fork, how many files it has open, and its processes."""
    fork = ForkedProcess(control)
    await fork.begin()
    said = await fork.receive()
    return fork, said["files"], [psutil.Process(process) for process in said["processes"]]


def are_gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_fork_has_no_file_of_another_and_ends_with_all_that_it_has_started(
    control: tuple[socket.socket, LineProcess],
) -> None:
    async def play() -> None:
        first, files, of_first = await begun(control[0])
        second, files_of_second, of_second = await begun(control[0])
        third, files_of_third, of_third = await begun(control[0])
        assert files == files_of_second == files_of_third
        await first.finish()  # it ends by itself
        assert are_gone(of_first)
        second.close()
        assert are_gone(of_second)
        assert all(process.is_running() for process in of_third)
        control[0].close()
        assert are_gone(of_third)
        assert control[1].status(20.0) == 0
        first.close()
        third.close()

    asyncio.run(play())
