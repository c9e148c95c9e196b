"""A child process: what it raises, how it dies, and that it never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlhf_core.errors import StageError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.vllm.environment import take_temporary_folder

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[3]
# A parent that waits for its child, whose process it names first, as that waits for its own.
PARENT = """
import signal, subprocess
from rlhf_core.processes.child_process import ChildProcess
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    with ChildProcess("the child") as process:
        print(process.pid, flush=True)
        process.call(subprocess.run, ["sleep", "600"])
"""


def _divide(by: int) -> float:
    return 1 / by


def test_it_has_its_environment_and_what_it_raises_is_raised_here() -> None:
    with ChildProcess("the child", {"OF_THE_CHILD": "7"}) as process:
        assert process.pid != os.getpid()
        assert process.call(os.getenv, "OF_THE_CHILD") == "7"
        with pytest.raises(ZeroDivisionError) as caught:
            process.call(_divide, by=0)
        assert "_divide" in str(caught.value.__cause__)  # the child's traceback
        assert process.call(_divide, by=2) == 0.5
    assert not psutil.pid_exists(process.pid)


def test_an_engine_s_child_leaves_no_temporary_folder(tmp_path: Path) -> None:
    with ChildProcess("the child", {"TMPDIR": str(tmp_path)}) as process:
        process.call(take_temporary_folder)
        process.call(tempfile.mkdtemp)
        assert [len([*folder.iterdir()]) for folder in tmp_path.iterdir()] == [1]
    assert not [*tmp_path.iterdir()]


def test_a_child_that_dies_is_named() -> None:
    with ChildProcess("the child") as process:
        for _ in range(2):
            with pytest.raises(StageError, match=r"^the child died: "):
                process.call(os.kill, process.pid, signal.SIGKILL)


@pytest.mark.parametrize("send", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_parent_and_with_what_it_started(send: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    command = [sys.executable, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        _wait_until(lambda: bool(child.children()))
        processes = [child, *child.children()]
        parent.send_signal(send)
        assert parent.wait(timeout=60) != 0
        _wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))


def _wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
