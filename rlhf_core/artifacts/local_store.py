"""A folder as a store, for one machine or several that share a file system."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from rlhf_core.artifacts.manifest import file_digest
from rlhf_core.artifacts.store import Entries, Entry, Paths, Store, checked_path, not_written, probe_contract
from rlhf_core.errors import ConflictError, IntegrityError, StoreError

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
        with self._explained(path), suppress(FileNotFoundError):  # deleted meanwhile
            if (file := self._stored(path)) is not None:
                data = file.read_bytes()
                return data, _tag(data)
        return None

    def put(self, path: str, data: bytes) -> None:
        with self._explained(path), self._locked(path), self._written(data) as temporary:
            os.replace(temporary, self._ready(path))

    def put_if_absent(self, path: str, data: bytes) -> None:
        with self._explained(path), self._written(data) as temporary:
            self._link(temporary, path)

    def replace(self, path: str, data: bytes, tag: str) -> None:
        with self._explained(path), self._locked(path):
            file = self._stored(path)
            if file is None:
                raise ConflictError(f"{self.url}: {path} is gone since it was read")
            if _tag(file.read_bytes()) != tag:
                raise ConflictError(f"{self.url}: {path} has changed since it was read")
            with self._written(data) as temporary:
                os.replace(temporary, file)

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
            file = self._stored(path)
        if file is None:
            raise StoreError(f"{self.url} has no object {path}")
        try:
            shutil.copyfile(file, local_path)
        except OSError as error:
            if error.errno == errno.EIO or (error.filename == str(file) and error.filename2 is None):  # of reading
                raise StoreError(f"the store {self.url} fails at `{path}`: {error.strerror or error}") from error
            raise not_written(local_path, error) from error

    def get_range(self, path: str, start: int, size: int) -> bytes | None:
        with self._explained(path), suppress(FileNotFoundError):  # deleted meanwhile
            if (stored := self._stored(path)) is not None:
                with stored.open("rb") as file:
                    file.seek(start)
                    return file.read(size)
        return None

    def hashed(self, path: str) -> tuple[str, int] | None:
        with self._explained(path), suppress(FileNotFoundError):  # deleted meanwhile
            if (file := self._stored(path)) is not None:
                return file_digest(file), file.stat().st_size
        return None

    def move(self, path: str, target: str) -> None:
        with self._explained(path), self._locked(path):
            os.replace(self._file(path), self._ready(target))

    def exists(self, path: str) -> bool:
        with self._explained(path):
            return self._stored(path) is not None

    def list(self, prefix: str) -> Paths:
        return sorted(self._paths(prefix))

    def entries(self, prefix: str) -> Entries:
        entries = []
        for path in sorted(self._paths(prefix)):
            with self._explained(path), suppress(FileNotFoundError):  # deleted meanwhile
                status = self._file(path).stat()
                modified = datetime.fromtimestamp(status.st_mtime, UTC)
                entries.append(Entry(path, status.st_size, modified, f"{status.st_ino}-{status.st_mtime_ns}"))
        return entries

    def _paths(self, prefix: str) -> Iterator[str]:
        # Walk only the folder that the prefix ends in.
        folder = prefix.rpartition("/")[0]
        start = self._folder / checked_path(folder) if folder else self._folder
        with self._explained(prefix):
            self._require_folder()
            files = []
            for where, folders, names in os.walk(start, onerror=_raise):
                if Path(where) == start:
                    folders[:] = [name for name in folders if name.startswith(prefix.rpartition("/")[2])]
                files += [Path(where, name) for name in names]
        paths = (file.relative_to(self._folder).as_posix() for file in files)
        return (path for path in paths if path.startswith(prefix) and not path.startswith("."))

    def delete(self, path: str) -> None:
        with self._explained(path), self._locked(path):
            self._file(path).unlink(missing_ok=True)

    def page_url(self, path: str) -> None:
        """Return None: a page served over HTTP may not link to a file."""

    def reach(self) -> None:
        """Check that the root is no file; the first write creates a missing folder."""
        with self._explained(""):
            self._require_folder()
            if self._folder.exists():
                next(self._folder.iterdir(), None)

    def probe(self) -> None:
        probe_contract(self)

    def _file(self, path: str) -> Path:
        return self._folder / checked_path(path)

    def _stored(self, path: str) -> Path | None:
        """Return the object's file, or None. Raises StoreError for a pipe or device, whose reading might never end."""
        file = self._file(path)
        try:
            mode = file.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            self._require_folder()
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise IntegrityError(f"{self.url}: {path} is a link that leads to itself: move it away") from error
            raise
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise IntegrityError(f"{self.url}: {path} is a pipe, a socket or a device, not a file: move it away")
        return file if stat.S_ISREG(mode) else None

    def _require_folder(self) -> None:
        """Raise StoreError if the root is a file, which would list as empty. A write creates a missing folder."""
        if self._folder.exists() and not self._folder.is_dir():
            raise StoreError(f"the store {self.url} is a file, not a folder: correct ALIGNMENT_STORE")

    def _ready(self, path: str) -> Path:
        """Return the path of the object's file, and create its folder."""
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def _link(self, temporary: Path, path: str) -> None:
        file = self._ready(path)
        try:
            os.link(temporary, file)
        except FileExistsError as error:
            if not file.is_file():  # no reader sees an object there, so no writer may take it for one
                raise StoreError(
                    f"{self.url}: {path} is a folder or a broken link where a file belongs: move it away"
                ) from error
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


def _raise(error: OSError) -> None:
    """Raise for a folder that cannot be listed; ignore one that is gone or is an object, which has no entries."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flush(file: Path) -> None:
    """Flush to disk, so that a power failure never leaves a name with part of its bytes."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
