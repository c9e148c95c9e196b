"""Multiprocessing children that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import psutil


def end_with_parent() -> None:
    """Make this multiprocessing child end with its parent, however that ends. Ctrl-C reaches the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    kill_below(psutil.Process())
    os._exit(1)


def kill_below(process: psutil.Process) -> None:
    """Kill all descendants of `process`."""
    for descendant in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
