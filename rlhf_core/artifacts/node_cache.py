"""A cache of blobs and of folders of blobs, shared by all jobs of a node: each blob is transferred once.

Bounded by ALIGNMENT_CACHE_GIB. Above that, the least recently used folders are removed, with the blobs that no other
folder links. Folders that a process has requested stay until it ends, so running jobs can exceed the bound.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_core.system.scratch import new_folder, remove, scratch_folder
from rlhf_core.system.variables import value_of

DEFAULT_GIB = 50.0

# The folders that this process has requested: file in `used` -> open handle, whose lock ends with the process.
_in_use: dict[Path, int] = {}
_in_use_guard = threading.Lock()


def bound_from_environment() -> int:
    """Return ALIGNMENT_CACHE_GIB in bytes. Raises VariableError if it is not a positive number."""
    return int(float(value_of("ALIGNMENT_CACHE_GIB") or DEFAULT_GIB) * 2**30)


class NodeCache:
    """`blobs/<digest>` and `folders/<digest of the list of files>/…`. A path with its final name is complete.

    Every process that uses a folder holds a shared lock on `used/<digest of the folder>`, whose modification time is
    that of the last use.
    """

    def __init__(self, root: Path, max_bytes: int | None = None):
        """max_bytes: the default is ALIGNMENT_CACHE_GIB."""
        self._root = root
        self._max_bytes = bound_from_environment() if max_bytes is None else max_bytes
        for name in ("blobs", "folders", "locks", "temporary", "used"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def folder(self, files: Mapping[str, str], get_blob: Callable[[str, Path], None]) -> Path:
        """Return the folder with `files`, relative path -> sha256. The files are read-only and kept until the process
        ends.

        get_blob(sha256, path) writes a verified blob to a new file; its errors are raised.
        """
        digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
        folder = self._root / "folders" / digest
        self._use(digest)
        with self._lock(digest):
            if folder.is_dir():
                if all(self._is_good(folder / path, sha256) for path, sha256 in files.items()):
                    return folder
                shutil.rmtree(folder)
            building = new_folder("folder", self._root / "temporary")
            try:
                for path, sha256 in files.items():
                    target = building / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._link_blob(sha256, get_blob, target)
                building.chmod(0o755)
                building.rename(folder)
            finally:
                remove(building)
        self.trim()
        return folder

    def trim(self) -> None:
        """Remove unused folders, least recently used first, until the rest is within the bound."""
        with suppress(Timeout), self._lock("trim").acquire(blocking=False):  # Timeout: another process is trimming
            if self._num_bytes() > self._max_bytes:
                self._remove_unlinked_blobs()
            for folder in sorted((self._root / "folders").iterdir(), key=self._last_use):
                if self._num_bytes() <= self._max_bytes:
                    break
                if self._remove_unused(folder):
                    self._remove_unlinked_blobs()

    def _link_blob(self, sha256: str, get_blob: Callable[[str, Path], None], target: Path) -> None:
        blob = self._root / "blobs" / sha256
        with self._lock(sha256):
            if not self._is_good(blob, sha256):
                with scratch_folder("blob", self._root / "temporary") as folder:
                    temporary = folder / sha256
                    get_blob(sha256, temporary)
                    temporary.chmod(0o444)
                    # With the size, a truncated file is detected at every use without reading its bytes.
                    self._size_file(sha256).write_text(str(temporary.stat().st_size))
                    temporary.replace(blob)
            _link(blob, target)  # under the lock, because a blob without links may be removed

    def _use(self, digest: str) -> None:
        path = self._root / "used" / digest
        with _in_use_guard:
            if path not in _in_use:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.flock(handle, fcntl.LOCK_SH)  # waits while another process removes the folder
                _in_use[path] = handle
        os.utime(path)

    def _last_use(self, folder: Path) -> float:
        used = self._root / "used" / folder.name
        return (used if used.exists() else folder).stat().st_mtime

    def _remove_unused(self, folder: Path) -> bool:
        """Remove `folder` unless a process uses it. Returns whether it was removed."""
        handle = os.open(self._root / "used" / folder.name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    def _remove_unlinked_blobs(self) -> None:
        for blob in (self._root / "blobs").iterdir():
            if blob.suffix == ".size" or blob.stat().st_nlink > 1:
                continue
            with suppress(Timeout), self._lock(blob.name).acquire(blocking=False):  # Timeout: in use
                if blob.stat().st_nlink == 1:
                    blob.unlink()

    def _num_bytes(self) -> int:
        """Return the size on disk; a file counts once, whatever the number of its links."""
        sizes = {}
        for top in ("blobs", "folders"):
            for parent, _, names in os.walk(self._root / top):
                for name in names:
                    with suppress(FileNotFoundError):  # a damaged folder is being rebuilt
                        status = os.stat(os.path.join(parent, name))
                        sizes[status.st_dev, status.st_ino] = status.st_size
        return sum(sizes.values())

    def _is_good(self, file: Path, sha256: str) -> bool:
        try:
            return file.stat().st_size == int(self._size_file(sha256).read_text())
        except (FileNotFoundError, ValueError):
            return False

    def _size_file(self, sha256: str) -> Path:
        return self._root / "blobs" / f"{sha256}.size"

    def _lock(self, digest: str) -> FileLock:
        return FileLock(self._root / "locks" / digest)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links, or the file has too many
        shutil.copyfile(source, target)
        target.chmod(0o444)
