"""Temporary folders that do not outlive their process: those of a killed process are removed by the next one.

A folder belongs to the process that holds its lock, which the kernel releases however that process ends; this works
across containers and nodes. On a file system without locks, nothing is swept.
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
    """Create a folder `alignment-scratch-<name>-…` in `root` (none: the system's temporary folder), removed at the end.

    Removes first the folders of dead processes in `root`.
    """
    folder = new_folder(name, root)
    try:
        yield folder
    finally:
        remove(folder)


def new_folder(name: str, root: Path | None = None) -> Path:
    """Create a folder like `scratch_folder`, kept until `remove`, `remove_all`, or a sweep after the process ended."""
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
    """Remove all folders of this process, none of which is needed any more."""
    for folder in list(_held):
        remove(folder)


def sweep(root: Path) -> None:
    """Remove the scratch folders in `root` whose processes have ended. Those of other users are left alone."""
    for folder in root.glob(f"{PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir() or folder in _held:
            continue
        handle = _locked(folder)
        if handle is not None:
            remove_tree(folder)
            os.close(handle)


def remove_tree(folder: Path) -> None:
    """Remove what can be removed of a folder of any depth; shutil.rmtree alone can exceed the recursion limit."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        with suppress(OSError):
            _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Move every folder below `folder`, at any depth, to depth two."""
    shallow = tempfile.mkdtemp(dir=folder)
    pending = [str(folder)]
    for path in pending:
        with os.scandir(path) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path_within in inner:
            if path_within != shallow:
                pending.append(f"{shallow}/{len(pending)}")
                os.rename(path_within, pending[-1])


def _locked(folder: Path) -> int | None:
    """Open and lock the folder; None if another process has locked or removed it, or it belongs to another user."""
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
