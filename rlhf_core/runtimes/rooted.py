"""Files below a folder that another program has filled: no link leads out of the folder."""

from __future__ import annotations

import ctypes
import os
import posixpath
import stat
from contextlib import suppress

_OPENAT2 = 437  # alike on all architectures
_IN_ROOT = 0x10 | 0x02  # a link starts at the root; none of /proc
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_below(root: int, path: str, content: bytes) -> None:
    """Write a file, executable, and the folders that lead to it. root: an open folder. Raises OSError."""
    folder, name = posixpath.split(_relative(path))
    if not name:
        raise IsADirectoryError(f"{path} is not a file")
    parent = _made(root, folder)
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)  # a link or a pipe too
        with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755, dir_fd=parent), "wb") as file:
            _give_to_owner(root, file.fileno())
            file.write(content)
    finally:
        os.close(parent)


def make_folder_below(root: int, path: str) -> None:
    os.close(_made(root, _relative(path)))


def is_folder_below(root: int, path: str) -> bool:
    try:
        os.close(_opened(root, _relative(path), os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


def read_below(root: int, path: str, most: int) -> bytes | None:
    """Return the content of a file, and one byte more than `most` of a longer one; None if it is no file."""
    try:
        descriptor = _opened(root, _relative(path), os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        return file.read(most + 1)


def _relative(path: str) -> str:
    return posixpath.normpath(f"/{path}").lstrip("/")


def _made(root: int, folder: str) -> int:
    """Open a folder, making those that are missing."""
    here = os.dup(root)
    place = ""
    for part in filter(None, folder.split("/")):
        place = f"{place}/{part}"
        try:
            below = _opened(root, place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            try:
                os.mkdir(part, 0o755, dir_fd=here)
                below = _opened(root, place, os.O_RDONLY | os.O_DIRECTORY)
                _give_to_owner(root, below)
            except OSError:
                os.close(here)
                raise
        except OSError:
            os.close(here)
            raise
        os.close(here)
        here = below
    return here


def _give_to_owner(root: int, descriptor: int) -> None:
    """Give a new file to whom the root belongs."""
    owner = os.fstat(root)
    if owner.st_uid != os.geteuid():
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _opened(root: int, path: str, flags: int) -> int:
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, _IN_ROOT)
    descriptor: int = _LIBC.syscall(_OPENAT2, root, os.fsencode(path or "."), ctypes.byref(how), ctypes.sizeof(how))
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)  # the class of its number
    return descriptor
