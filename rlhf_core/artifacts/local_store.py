"""The contract on a folder of this machine: the smallest set-up, and the shipped double of a bucket."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from rlhf_core.artifacts.store import probe_contract
from rlhf_core.errors import ConflictError, StoreError

_LOCKS = ".locks"


class LocalStore:
    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = str(self._root)

    def get(self, path: str) -> bytes | None:
        try:
            return self._path(path).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        data = self.get(path)
        return None if data is None else (data, _tag(data))

    def put(self, path: str, data: bytes) -> None:
        with self._written(path, lambda file: _write(file, data)) as written:
            written.replace(self._path(path))

    def put_if_absent(self, path: str, data: bytes) -> None:
        if not self._link_if_absent(path, lambda file: _write(file, data)):
            raise ConflictError(f"{self.url}/{path} exists already")

    def replace(self, path: str, data: bytes, tag: str) -> None:
        with self._lock(path):
            read = self.get_tagged(path)
            if read is None or read[1] != tag:
                raise ConflictError(f"{self.url}/{path} is not what it was when it was read")
            self.put(path, data)

    def put_file_if_absent(self, path: str, local: Path) -> bool:
        return not self.exists(path) and self._link_if_absent(path, lambda file: _copy(local, file))

    def get_file(self, path: str, local: Path) -> None:
        try:
            _copy(self._path(path), local)
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}/{path} is not there") from error

    def exists(self, path: str) -> bool:
        return self._path(path).is_file()

    def list(self, prefix: str) -> Iterator[str]:
        for folder, _, names in os.walk(self._path(prefix)):
            for name in names:
                yield (Path(folder) / name).relative_to(self._root).as_posix()

    def delete(self, path: str) -> None:
        self._path(path).unlink(missing_ok=True)

    def probe(self) -> None:
        probe_contract(self)

    def _path(self, path: str) -> Path:
        if path.startswith("/") or ".." in Path(path).parts:
            raise ValueError(f"{path}: not a path inside the store")
        return self._root / path

    def _link_if_absent(self, path: str, write: Callable[[Path], None]) -> bool:
        # A hard link is the one file system call that creates a whole file, or fails because there is one.
        with self._written(path, write) as written:
            try:
                os.link(written, self._path(path))
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _written(self, path: str, write: Callable[[Path], None]) -> Iterator[Path]:
        """A temporary file beside the store's, written and synced; gone afterwards unless it was moved."""
        target = self._path(path)
        temporary = self._root / ".temporary"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir(exist_ok=True)
            handle, name = tempfile.mkstemp(dir=temporary)
            os.close(handle)
        except OSError as error:
            raise StoreError(f"{self.url}: cannot write there: {error.strerror}") from error
        written = Path(name)
        try:
            write(written)
            yield written
        finally:
            written.unlink(missing_ok=True)

    def _lock(self, path: str) -> FileLock:
        locks = self._root / _LOCKS
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / hashlib.sha256(path.encode()).hexdigest())


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as inp, target.open("wb") as out:
        shutil.copyfileobj(inp, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
