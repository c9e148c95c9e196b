"""The output of a child process, and of those that it starts, is shown if the command fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import pytest

from rlhf_core.errors import StageError
from rlhf_core.processes.child_output import kept_output
from rlhf_core.processes.child_process import ChildProcess

pytestmark = pytest.mark.parts


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)


def _noise() -> None:
    warnings.warn("of Python", FutureWarning, stacklevel=1)
    print("to standard output", flush=True)
    os.write(2, b"of a C library\n")
    subprocess.run([sys.executable, "-c", "import sys; print('of a grandchild', file=sys.stderr)"], check=True)


def _dies() -> None:
    _noise()
    os._exit(3)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


SAID = ("of Python", "to standard output", "of a C library", "of a grandchild")


def test_nothing_is_shown_of_a_process_that_does_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    with kept_output() as output, ChildProcess("the child", output=output) as process:
        process.call(_noise)
    assert capfd.readouterr() == ("", "")


def test_all_is_shown_before_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(StageError, match=r"^the child died: its last output is above"),
        kept_output() as output,
        ChildProcess("the child", output=output) as process,
    ):
        process.call(_dies)
    shown = capfd.readouterr().err
    assert [said for said in SAID if said not in shown] == []


def test_a_server_shows_what_it_prints_while_it_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with kept_output() as output, ChildProcess("the child", output=output) as process:
        assert output is not None
        process.call(print, "as it starts", flush=True)
        wait_until(lambda: output.kept == b"as it starts\n")
        output.follow()
        process.call(print, "an error of a request", flush=True)
        shown: list[str] = []
        wait_until(lambda: bool(shown.append(capfd.readouterr().err)) or "".join(shown).endswith("\n"))
        output.keep()
        process.call(print, "as it ends", flush=True)
    assert "".join([*shown, capfd.readouterr().err]) == "an error of a request\n"


def test_a_level_of_vllms_log_shows_everything(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with kept_output() as output, ChildProcess("the child", output=output) as process:
        process.call(_noise)
    assert "of a C library" in capfd.readouterr().err
