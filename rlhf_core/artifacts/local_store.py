"""A folder as a store: for one machine, or for several that share a file system."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from rlhf_core.artifacts.manifest import file_digest
from rlhf_core.artifacts.store import Paths, Store, checked_path, probe_contract
from rlhf_core.errors import ConflictError, StoreError

_TEMPORARY = ".temporary"
_LOCKS = ".locks"


class LocalStore(Store):
    """Objects are files. A new one is created by hard link, which fails if the name exists. Tags are content hashes."""

    def __init__(self, folder: Path):
        self.url = str(folder)
        self._folder = folder

    def __reduce__(self) -> tuple[type[LocalStore], tuple[Path]]:
        return LocalStore, (self._folder,)

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        with self._explained(path):
            try:
                data = self._file(path).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None
            return data, _tag(data)

    def put(self, path: str, data: bytes) -> None:
        with self._explained(path), self._locked(path), self._written(data) as temporary:
            os.replace(temporary, self._ready(path))

    def put_if_absent(self, path: str, data: bytes) -> None:
        with self._explained(path), self._written(data) as temporary:
            self._link(temporary, path)

    def replace(self, path: str, data: bytes, tag: str) -> None:
        with self._explained(path), self._locked(path):
            try:
                stored = self._file(path).read_bytes()
            except FileNotFoundError as error:
                raise ConflictError(f"{self.url}: {path} is gone since it was read") from error
            if _tag(stored) != tag:
                raise ConflictError(f"{self.url}: {path} has changed since it was read")
            with self._written(data) as temporary:
                os.replace(temporary, self._file(path))

    def put_file_if_absent(self, path: str, local_path: Path) -> bool:
        if self.exists(path):
            return False
        with self._explained(path), self._temporary() as temporary:
            shutil.copyfile(local_path, temporary)
            _flush(temporary)
            try:
                self._link(temporary, path)
            except ConflictError:
                return False
        return True

    def get_file(self, path: str, local_path: Path) -> None:
        with self._explained(path):
            shutil.copyfile(self._file(path), local_path)

    def hashed(self, path: str) -> tuple[str, int] | None:
        with self._explained(path):
            try:
                file = self._file(path)
                return file_digest(file), file.stat().st_size
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def move(self, path: str, target: str) -> None:
        with self._explained(path), self._locked(path):
            os.replace(self._file(path), self._ready(target))

    def exists(self, path: str) -> bool:
        with self._explained(path):
            return self._file(path).is_file()

    def list(self, prefix: str) -> Paths:
        # Walk only the folder that the prefix ends in.
        folder = prefix.rpartition("/")[0]
        start = self._folder / checked_path(folder) if folder else self._folder
        with self._explained(prefix):
            files = [Path(where, name) for where, _, names in os.walk(start) for name in names]
        paths = (file.relative_to(self._folder).as_posix() for file in files)
        return sorted(path for path in paths if path.startswith(prefix) and not path.startswith("."))

    def delete(self, path: str) -> None:
        with self._explained(path), self._locked(path):
            self._file(path).unlink(missing_ok=True)

    def reach(self) -> None:
        """A folder that is not there yet is made by the first write."""
        with self._explained(""):
            if self._folder.exists():
                next(self._folder.iterdir(), None)

    def probe(self) -> None:
        probe_contract(self)

    def _file(self, path: str) -> Path:
        return self._folder / checked_path(path)

    def _ready(self, path: str) -> Path:
        """The path of the object's file; creates its folder."""
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def _link(self, temporary: Path, path: str) -> None:
        try:
            os.link(temporary, self._ready(path))
        except FileExistsError as error:
            raise ConflictError(f"{self.url}: {path} exists already") from error

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        # On the same file system as the object, because it is linked or renamed to it.
        file = self._folder / _TEMPORARY / uuid.uuid4().hex
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    @contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        with self._temporary() as file:
            file.write_bytes(data)
            _flush(file)
            yield file

    @contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        lock = self._folder / _LOCKS / hashlib.sha256(path.encode()).hexdigest()[:2]
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            yield

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the store {self.url} fails at `{path}`: {error.strerror or error}") from error


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flush(file: Path) -> None:
    """Write to disk, so that a power failure never leaves a name with part of its bytes."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
