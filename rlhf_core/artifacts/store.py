"""The interface of a store: bytes under paths, with two conditional writes, put-if-absent and compare-and-swap."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

from rlhf_core.errors import ConflictError, StoreError


class Entry(NamedTuple):
    """An object in a listing."""

    path: str
    size: int  # in bytes
    modified: datetime  # when it was written last, by the store's clock; aware
    version: str  # changes with every write of other content


Paths: TypeAlias = list[str]  # aliases, because `list` is a method below
Entries: TypeAlias = list[Entry]


class Store(ABC):
    """Objects by relative posix path. Every method raises StoreError, in one sentence, if the store fails.

    Writes are atomic and visible to every later read. A store is picklable; the copy connects again.
    """

    url: str

    @abstractmethod
    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        """Return the object and its tag, for `replace`; None if there is no object."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write unconditionally."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> None:
        """Write if there is no such object; else raise ConflictError.

        A write whose response was lost is retried and then conflicts with itself. A caller that must know whether its
        write succeeded writes unique data and reads it back after a ConflictError.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes, tag: str) -> None:
        """Write if the object still has this `tag`; else raise ConflictError, as `put_if_absent` does."""

    @abstractmethod
    def put_file_if_absent(self, path: str, local_path: Path) -> bool:
        """Write a local file of any size. Returns False, without reading the file, if the object exists."""

    @abstractmethod
    def get_file(self, path: str, local_path: Path) -> None:
        """Copy the object to a local file. Raises StoreError if there is no such object."""

    @abstractmethod
    def get_range(self, path: str, start: int, size: int) -> bytes | None:
        """Return `size` bytes of the object from `start`, or fewer at its end; None if there is no object."""

    @abstractmethod
    def hashed(self, path: str) -> tuple[str, int] | None:
        """Return SHA-256 and size of the object, read as a stream; None if there is no object."""

    @abstractmethod
    def move(self, path: str, target: str) -> None:
        """Rename the object, overwriting any object at `target`. Raises StoreError if there is no such object."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def list(self, prefix: str) -> Paths:
        """Return the sorted paths of all objects that start with `prefix`, which need not end at a slash."""

    @abstractmethod
    def entries(self, prefix: str) -> Entries:
        """Return what `list` does, with size and age of each object, read without their content."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete the object; no-op if there is none."""

    @abstractmethod
    def page_url(self, path: str) -> str | None:
        """Return a URL at which a browser shows an HTML object without credentials, for a limited time; or None."""

    @abstractmethod
    def reach(self) -> None:
        """Check by reading alone that the store responds and accepts our credentials. Raises StoreError."""

    @abstractmethod
    def probe(self) -> None:
        """Check that the store exists, accepts our credentials and keeps the contract. Raises StoreError."""

    def put_if_unchanged(self, path: str, data: bytes, tag: str | None) -> None:
        """Write if the object has this `tag`, or, for None, if there is none; else raise ConflictError."""
        if tag is None:
            self.put_if_absent(path, data)
        else:
            self.replace(path, data, tag)

    def get(self, path: str) -> bytes | None:
        content_and_tag = self.get_tagged(path)
        return None if content_and_tag is None else content_and_tag[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def is_path(path: str) -> bool:
    """Return whether `path` can name an object: a normal relative posix path."""
    parts = PurePosixPath(path).parts
    return bool(parts) and path == "/".join(parts) and not (parts[0].startswith(("/", ".")) or ".." in parts)


def not_written(file: Path, error: OSError) -> StoreError:
    """Return the error for a local target file that cannot be written; the store itself works."""
    what = error.strerror or error
    return StoreError(f"'{file}' cannot be written ({what}): free space there, or use another folder")


def checked_path(path: str) -> str:
    """Return `path` if it can name an object; else raise StoreError."""
    if not is_path(path):
        raise StoreError(f"`{path}` cannot name an object: it must be a relative path without `.`, `..` or `//`")
    return path


def probe_contract(store: Store) -> None:
    """Test every guarantee once on a new object. Raises StoreError that names the first one that is violated."""
    path = f"probe/{uuid.uuid4().hex}"
    first, second = b"first", b"second"
    try:
        store.put_if_absent(path, first)
        _must_conflict(store, "put-if-absent overwrites", lambda: store.put_if_absent(path, second))
        tagged = store.get_tagged(path)
        if tagged is None or tagged[0] != first:
            raise StoreError(
                f"{store.url}: a read returns other bytes than were written, so no result would be safe there"
            )
        store.replace(path, second, tagged[1])
        if store.get(path) != second:
            raise StoreError(f"{store.url}: a read after a write returns old bytes, so no result would be safe there")
        _must_conflict(store, "a stale compare-and-swap overwrites", lambda: store.replace(path, first, tagged[1]))
    except ConflictError as error:
        raise StoreError(f"{store.url}: a conditional write fails although its condition holds: {error}") from error
    finally:
        store.delete(path)


def _must_conflict(store: Store, broken: str, write: Callable[[], None]) -> None:
    try:
        write()
    except ConflictError:
        return
    raise StoreError(
        f"{store.url}: this store has no conditional writes ({broken}), so two runs could overwrite each other's "
        "results; use one that has them, such as AWS S3 or SeaweedFS"
    )
