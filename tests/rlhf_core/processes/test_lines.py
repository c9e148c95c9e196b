"""A process that answers lines: how it ends, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlhf_core.processes.lines import LineProcess, ProcessError
from rlhf_core.processes.trial import tried

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[3]
ECHO = """
import subprocess, sys, time
for line in sys.stdin:
    if "start" in line:
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    elif "hang" in line:
        time.sleep(600)
    elif "write" in line:
        print("no JSON", flush=True)
    elif "leave" in line:
        sys.exit(3)
"""


def test_what_comes_of_a_request() -> None:
    with closing(LineProcess(["-c", ECHO])) as process:
        started = psutil.Process(process.exchange("start", 20.0))
        with pytest.raises(ValueError, match="Expecting value"):
            process.exchange("write", 20.0)
        with pytest.raises(TimeoutError):
            process.exchange("hang", 0.2)
    assert psutil.wait_procs([started], timeout=20)[1] == []
    assert not psutil.pid_exists(process.pid)


def test_an_interrupt_of_the_job_and_its_children_leaves_it_at_work() -> None:
    with closing(LineProcess(["-c", ECHO])) as process:
        os.kill(process.pid, signal.SIGINT)
        assert psutil.pid_exists(process.exchange("start", 20.0))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == set()


def test_the_group_of_a_process_that_has_ended_is_killed_before_its_id_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = LineProcess(["-c", ECHO])
    started = psutil.Process(process.exchange("start", 20.0))
    with pytest.raises(ProcessError, match="ended with status 3"):
        process.exchange("leave", 20.0)
    kill, taken = os.killpg, []

    def kill_group(group: int, number: int) -> None:
        taken.append(psutil.Process(group).status())
        kill(group, number)

    monkeypatch.setattr(os, "killpg", kill_group)
    process.close(after_seconds=5.0)
    assert taken == [psutil.STATUS_ZOMBIE]
    assert psutil.wait_procs([started], timeout=20)[1] == []
    process.close()


def die(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [(signal.SIGSEGV, "^was ended by signal 11"), ("none", "^raised TypeError: 'str' object cannot be interpreted")],
)
def test_a_trial_that_fails_says_how(argument: int, problem: str) -> None:
    assert tried(20.0, 2**32, os.path.basename, "a/b") == "b"
    with pytest.raises(ProcessError, match=problem):
        tried(20.0, 2**32, die, argument)


def test_a_trial_ends_when_its_process_is_killed() -> None:
    code = "import time; from rlhf_core.processes.trial import tried; tried(600.0, 2**32, time.sleep, 600)"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}) as asking:
        deadline = time.monotonic() + 30
        while not (trials := psutil.Process(asking.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asking.kill()
    assert psutil.wait_procs(trials, timeout=20)[1] == []
