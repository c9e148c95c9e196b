"""Stacks of processes, also of those that hang in C code: each writes its own when it gets a signal.

The handler is C code of faulthandler, so it needs neither the GIL nor a debugger's rights.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

_SIGNAL = signal.SIGUSR2
_OF_CHILDREN = "ALIGNMENT_STACKS_OF"  # the job, for processes that a registered one starts
_WRITE_SECONDS = 5.0
_POLL_SECONDS = 0.1

_own: tuple[int, TextIO] | None = None  # process and file: a fork has its parent's until it registers itself


def register(name: str, job: str = "") -> None:
    """Let `stacks_here` find this process, as `name`, among those of `job`; no job: that of the process that started
    it, if it has one.
    """
    global _own
    process, job = os.getpid(), job or os.environ.get(_OF_CHILDREN, "")
    if not job or (_own is not None and _own[0] == process):
        return
    os.environ[_OF_CHILDREN] = job
    _folder().mkdir(mode=0o700, exist_ok=True)
    file = (_folder() / f"{job}-{process}").open("w+", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for as long as the process lives
    print(f"{name}, process {process}", file=file, flush=True)
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    _own = process, file


def unregister() -> None:
    """Remove this process's file. A killed process leaves its own, which the next look removes."""
    global _own
    if _own is not None and _own[0] == os.getpid():
        faulthandler.unregister(_SIGNAL)
        Path(_own[1].name).unlink(missing_ok=True)
        _own[1].close()
        _own = None


def stacks_here(job: str) -> dict[str, str]:
    """Return the stacks of all threads of this machine's registered processes of `job`, by name."""
    stacks: dict[str, str] = {}
    for path in sorted(_folder().glob(f"{job}-*")):
        with (
            suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess),
            path.open(errors="replace") as file,
        ):  # it may end now
            if not _is_held(file):
                path.unlink(missing_ok=True)
                continue
            process = int(path.name.rpartition("-")[2])
            os.kill(process, _SIGNAL)
            name, _, text = _settled(file).partition("\n")
            stacks[name] = text or f"it writes no stack: its state is {psutil.Process(process).status()}"
    return stacks


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"alignment-stacks-{os.getuid()}"


def _is_held(file: TextIO) -> bool:
    """Return whether the process of the file is alive: its number may be another's by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _settled(file: TextIO) -> str:
    """Return the content once it does not grow any more."""
    deadline, text = time.monotonic() + _WRITE_SECONDS, ""
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        file.seek(0)
        now = file.read()
        if now == text and "\n" in now.strip():
            break
        text = now
    return text
