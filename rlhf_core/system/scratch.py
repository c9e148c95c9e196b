"""Temporary folders that do not outlive their process: what a killed process leaves, the next one removes.

A folder belongs to the process that holds the lock on it, which the kernel releases however that process ends. So
processes of other containers and nodes are seen too. Where a file system has no locks, nothing is swept.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "alignment-scratch-"

_held: dict[Path, int] = {}  # this process's folders -> the open folder that carries the lock


@contextmanager
def scratch_folder(name: str, root: Path | None = None) -> Iterator[Path]:
    """A new folder `alignment-scratch-<name>-…` in `root` (none: the system's temporary folder), removed at the end.

    Removes first what dead processes have left in `root`.
    """
    folder = new_folder(name, root)
    try:
        yield folder
    finally:
        remove(folder)


def new_folder(name: str, root: Path | None = None) -> Path:
    """Like `scratch_folder`, until `remove`, `remove_all`, or the end of the process and the next sweep."""
    root = root or Path(tempfile.gettempdir())
    sweep(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=root))
        handle = _locked(folder)
        if handle is None and not _has_locks(root):
            handle = os.open(folder, os.O_RDONLY)
        if handle is not None:  # else a sweep saw it before it was locked, and has removed it
            if not _held:
                atexit.register(remove_all)
            _held[folder] = handle
            return folder


def remove(folder: Path) -> None:
    handle = _held.pop(folder, None)
    if handle is not None:
        remove_tree(folder)
        os.close(handle)


def remove_all() -> None:
    """Removes all folders of this process, which will need none of them again."""
    for folder in list(_held):
        remove(folder)


def sweep(root: Path) -> None:
    """Removes the scratch folders in `root` whose processes have ended. Those of other users are left alone."""
    for folder in root.glob(f"{PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir() or folder in _held:
            continue
        handle = _locked(folder)
        if handle is not None:
            remove_tree(folder)
            os.close(handle)


def remove_tree(folder: Path) -> None:
    """Removes what can be removed of a folder, however deep it is: shutil.rmtree recurses, and a program may not."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        with suppress(OSError):
            _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Moves every folder inside of it, at any depth, to the same depth of two."""
    shallow = tempfile.mkdtemp(dir=folder)
    pending = [str(folder)]
    for path in pending:
        with os.scandir(path) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for found in inner:
            if found != shallow:
                pending.append(f"{shallow}/{len(pending)}")
                os.rename(found, pending[-1])


def _locked(folder: Path) -> int | None:
    """The open folder with its lock; None if another process has it, or removed it, or it is another user's."""
    handle = None
    with suppress(OSError):  # BlockingIOError: it is locked
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(handle)
        if status.st_uid == os.getuid() and folder.stat().st_ino == status.st_ino:
            return handle
    if handle is not None:
        os.close(handle)
    return None


def _has_locks(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
