"""The terminal of a debugging session, lent to processes of the user's code while `alignment try` runs."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLE = "ALIGNMENT_TRY_TERMINAL"  # its device, for child processes


@contextmanager
def lent_terminal() -> Iterator[None]:
    """Lend this process's terminal, if it has one, to processes of the user's code that are started in the context."""
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
    """Return the time limit of the user's code: none with a terminal, where a person may be at a debugger's prompt."""
    return None if is_lent() else seconds


def open_standard_files() -> None:
    """Connect a user process's standard streams to the terminal, or to no input and the log; its pipes are in use."""
    if not is_lent():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        return
    terminal = _opened()
    os.dup2(terminal, 0)
    os.dup2(terminal, 1)
    sys.breakpointhook = _ask


def _ask(*arguments: Any, **named: Any) -> Any:
    """Run `breakpoint()` in one process at a time: episodes run concurrently."""
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*arguments, **named)
    from pdb import Pdb  # most processes need none

    class OneAtATime(Pdb):
        def interaction(self, *arguments: Any) -> None:
            # Not until the episode is over: the others may have to answer before it can be.
            with os.fdopen(_opened(), "rb") as terminal:
                fcntl.flock(terminal, fcntl.LOCK_EX)
                super().interaction(*arguments)

    return OneAtATime().set_trace(sys._getframe().f_back)


def _opened() -> int:
    return os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_NOCTTY)
