"""Stacks of other processes, which may hang in C code or be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.system import stacks

pytestmark = pytest.mark.parts

# Matching takes for ever, and holds the GIL.
HANGS = """
import re
from rlhf_core.system.stacks import register
register("rank 0", "{job}")
{more}
print("ready", flush=True)
def matches_for_ever():
    re.match("(a+)+b", "a" * 60)
matches_for_ever()
"""


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def hanging(job: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(more: str = "") -> subprocess.Popen[str]:
        code = HANGS.format(job=job, more=more)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    stacks.stacks_here(job)  # removes their files


def test_a_process_that_hangs_in_c_code_shows_where(job: str, hanging: Callable[[str], subprocess.Popen[str]]) -> None:
    process = hanging("")
    time.sleep(0.5)  # until it matches
    ((name, text),) = stacks.stacks_here(job).items()
    assert name == f"rank 0, process {process.pid}"
    assert "in matches_for_ever" in text
    assert process.poll() is None


def test_what_a_process_forks_is_found_under_its_own_name(
    job: str, hanging: Callable[[str], subprocess.Popen[str]]
) -> None:
    child = """
import os
registered, done = os.pipe()
if (child := os.fork()) == 0:
    register("a worker")
    os.write(done, b".")
    print = lambda *_, **__: None
else:
    os.read(registered, 1)
    print(child, flush=True)
"""
    process = hanging("")
    code = HANGS.format(job=job, more=child)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        forked = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        assert set(stacks.stacks_here(job)) == {
            f"rank 0, process {process.pid}", f"rank 0, process {parent.pid}", f"a worker, process {forked}"
        }  # fmt: skip
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_a_stopped_process_is_said_to_be_stopped(
    job: str, hanging: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hanging("")
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stacks, "_WRITE_SECONDS", 0.5)
    assert stacks.stacks_here(job) == {f"rank 0, process {process.pid}": "it writes no stack: its state is stopped"}


def test_the_number_of_a_dead_process_gets_no_signal_and_its_file_is_removed(
    job: str, hanging: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hanging("")
    process.kill()
    process.wait()
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signalled"))
    (file,) = stacks._folder().glob(f"{job}-*")
    assert stacks.stacks_here(job) == {}
    assert not Path(file).exists()
