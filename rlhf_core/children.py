"""Processes that a process starts for itself, and that end with it; and how a process ended, in words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import psutil

_SIGNALS = frozenset(map(int, signal.Signals))
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def end_with_parent() -> None:
    """Called in a process that multiprocessing has started: it ends with its parent, however that ends. Ctrl-C reaches
    the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    kill_below(psutil.Process())
    os._exit(1)


def how_it_ended(status: int) -> str:
    """What follows "its process": "was killed (signal 9), usually because memory ran out", "ended with status 3".

    status: below 0 of a signal, as Python has it, or above 128, as a shell.
    """
    number = -status if status < 0 else status - 128
    if number not in _SIGNALS:
        return f"ended with status {status}"
    if number == signal.SIGKILL:
        return "was killed (signal 9), usually because memory ran out"
    crash = ", a crash in compiled code" if number in _CRASHES else ""
    return f"was ended by signal {number} ({signal.Signals(number).name}){crash}"


def kill_below(process: psutil.Process) -> None:
    """End all that `process` has started, at once."""
    for found in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.kill()
