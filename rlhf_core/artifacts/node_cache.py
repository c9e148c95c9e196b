"""Blobs and folders of them on one node, shared by its jobs: each blob is transferred once, each folder linked once.

Bounded by ALIGNMENT_CACHE_GIB: once it holds more, the folders that were asked for longest ago go, with the blobs that
no other folder links. A process keeps what it has asked for until it ends; so the bound can be exceeded by what running
jobs use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_core.errors import StoreError

DEFAULT_GIB = 50.0
_ABANDONED_SECONDS = 24 * 3600.0  # no transfer into `temporary` takes that long

# The folders that this process has asked for: file in `used` -> its open handle, whose lock ends with the process.
_in_use: dict[Path, int] = {}
_in_use_guard = threading.Lock()


def bound_from_environment() -> int:
    """Bytes that a node's cache may hold: ALIGNMENT_CACHE_GIB. Raises StoreError for what is no positive number."""
    text = os.environ.get("ALIGNMENT_CACHE_GIB") or str(DEFAULT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not gib > 0:
        raise StoreError(f"ALIGNMENT_CACHE_GIB is `{text}`: give how many GiB the cache may hold, such as 50")
    return int(min(gib, 2.0**40) * 2**30)


class NodeCache:
    """`blobs/<digest>`, `folders/<digest of the list of files>/…`; what has its final name is whole.

    `used/<digest of a folder>` is locked, shared, by every process that uses the folder; its time is the last use's.
    """

    def __init__(self, root: Path, max_bytes: int | None = None):
        """max_bytes: without it, ALIGNMENT_CACHE_GIB."""
        self._root = root
        self._max_bytes = bound_from_environment() if max_bytes is None else max_bytes
        for name in ("blobs", "folders", "locks", "temporary", "used"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def folder(self, files: Mapping[str, str], get_blob: Callable[[str, Path], None]) -> Path:
        """The folder with `files`, relative path -> sha256. Its files are read-only, and stay while this process lives.

        get_blob(sha256, path) writes a verified blob into a new file; what it raises goes through.
        """
        digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
        folder = self._root / "folders" / digest
        self._use(digest)
        with self._lock(digest):
            if folder.is_dir():
                if all(self._is_good(folder / path, sha256) for path, sha256 in files.items()):
                    return folder
                shutil.rmtree(folder)
            building = Path(tempfile.mkdtemp(dir=self._root / "temporary"))
            try:
                for path, sha256 in files.items():
                    target = building / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._link_blob(sha256, get_blob, target)
                building.chmod(0o755)
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        self.trim()
        return folder

    def trim(self) -> None:
        """Remove what no process uses, longest unused first, until the rest is within the bound."""
        with suppress(Timeout), self._lock("trim").acquire(blocking=False):  # or somebody else is at it
            self._remove_abandoned()
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
                handle, name = tempfile.mkstemp(dir=self._root / "temporary")
                os.close(handle)
                temporary = Path(name)
                try:
                    get_blob(sha256, temporary)
                    temporary.chmod(0o444)
                    # The size, so that a file cut short later is noticed without reading every byte at every use.
                    self._size_file(sha256).write_text(str(temporary.stat().st_size))
                    temporary.replace(blob)
                finally:
                    temporary.unlink(missing_ok=True)
            _link(blob, target)  # still locked: a blob without links may be removed

    def _use(self, digest: str) -> None:
        path = self._root / "used" / digest
        with _in_use_guard:
            if path not in _in_use:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.flock(handle, fcntl.LOCK_SH)  # waits while somebody removes the folder
                _in_use[path] = handle
        os.utime(path)

    def _last_use(self, folder: Path) -> float:
        used = self._root / "used" / folder.name
        return (used if used.exists() else folder).stat().st_mtime

    def _remove_unused(self, folder: Path) -> bool:
        """Whether `folder` could be removed: no process uses it."""
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
            with suppress(Timeout), self._lock(blob.name).acquire(blocking=False):  # or somebody is about to link it
                if blob.stat().st_nlink == 1:
                    blob.unlink()

    def _remove_abandoned(self) -> None:
        """What killed jobs left half transferred."""
        for path in (self._root / "temporary").iterdir():
            with suppress(FileNotFoundError):  # its transfer has ended
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _num_bytes(self) -> int:
        """On the disk: a file counts once, however many links it has."""
        sizes = {}
        for top in ("blobs", "folders"):
            for parent, _, names in os.walk(self._root / top):
                for name in names:
                    with suppress(FileNotFoundError):  # a folder that was damaged is being made anew
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
    except OSError:  # a file system without hard links, or too many of them
        shutil.copyfile(source, target)
        target.chmod(0o444)
