"""The terminal of a debugging session: processes of the user's code have it while `alignment try` runs in one."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLE = "ALIGNMENT_TRY_TERMINAL"  # its device, for child processes
_lock: int | None = None  # descriptor, in a process of the user's code that has the terminal


@contextmanager
def lent_terminal() -> Iterator[None]:
    """Processes of the user's code that are started here have this process's terminal, if it has one."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    settings = termios.tcgetattr(0)
    os.environ[_VARIABLE] = os.ttyname(0)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        # A debugger that was killed at its prompt has left the terminal without echo.
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def is_lent() -> bool:
    return _VARIABLE in os.environ


def limited(seconds: float | None) -> float | None:
    """The time limit of the user's code: none with a terminal, where a person may be at a debugger's prompt."""
    return None if is_lent() else seconds


def open_standard_files() -> None:
    """For a process of the user's code whose pipes are in use elsewhere: its input is empty, and its output goes to the
    log. With a terminal it reads and writes there."""
    global _lock
    if not is_lent():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        return
    terminal = os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_NOCTTY)
    os.dup2(terminal, 0)
    os.dup2(terminal, 1)
    sys.breakpointhook = _ask
    _lock = terminal


def own_lock() -> None:
    """For a fork of a process with a terminal: what it inherited is one lock with all other forks."""
    global _lock
    if _lock is not None:
        _lock = os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_NOCTTY)


def release() -> None:
    """Let another process ask: the user's code has returned."""
    if _lock is not None:
        fcntl.flock(_lock, fcntl.LOCK_UN)


def _ask(*arguments: Any, **named: Any) -> Any:
    """As `breakpoint()` does, but one process at a time: episodes run side by side."""
    assert _lock is not None
    fcntl.flock(_lock, fcntl.LOCK_EX)
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*arguments, **named)
    from pdb import Pdb  # most processes need none

    return Pdb().set_trace(sys._getframe().f_back)
