"""Bytes under paths, with two conditional writes: put-if-absent and compare-and-swap. A store needs nothing else."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from rlhf_core.errors import ConflictError, StoreError

Paths: TypeAlias = list[str]  # a name for it, since `list` is a method below


class Store(ABC):
    """Objects by relative posix path. Every method raises StoreError, in one sentence, when the store fails.

    A write is whole or not there, and seen by every later read. A store is picklable: it opens again where it arrives.
    """

    url: str

    @abstractmethod
    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        """The object and the tag that `replace` wants; None if there is none."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write, whatever was there."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> None:
        """Write, unless the object exists: ConflictError.

        A write whose answer was lost is repeated and then meets itself: whoever must know that it won writes data that
        no other writer writes, and reads it back after a ConflictError.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes, tag: str) -> None:
        """Write, unless the object is gone or not the one that `tag` came with: ConflictError, as `put_if_absent`."""

    @abstractmethod
    def put_file_if_absent(self, path: str, local_path: Path) -> bool:
        """Write the content of a local file of any size; False, without reading it, if the object exists."""

    @abstractmethod
    def get_file(self, path: str, local_path: Path) -> None:
        """Copy the object into a local file. StoreError if there is no such object."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def list(self, prefix: str) -> Paths:
        """Sorted paths of all objects whose path starts with `prefix`, which need not end at a slash."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Nothing happens if there is no such object."""

    @abstractmethod
    def probe(self) -> None:
        """Prove that the store is there, takes our credentials and keeps the contract. StoreError says what fails."""

    def get(self, path: str) -> bytes | None:
        found = self.get_tagged(path)
        return None if found is None else found[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def checked_path(path: str) -> str:
    """`path`, if it is a relative posix path that leads nowhere else. Raises StoreError."""
    parts = PurePosixPath(path).parts
    if not parts or path != "/".join(parts) or parts[0] == "/" or ".." in parts or parts[0].startswith("."):
        raise StoreError(f"`{path}` cannot name an object: it must be a relative path without `.`, `..` or `//`")
    return path


def probe_contract(store: Store) -> None:
    """Tries every promise once on an object of its own. Raises StoreError naming the first that is broken."""
    path = f"probe/{uuid.uuid4().hex}"
    first, second = b"first", b"second"
    try:
        store.put_if_absent(path, first)
        _must_conflict(store, "put-if-absent overwrites", lambda: store.put_if_absent(path, second))
        found = store.get_tagged(path)
        if found is None or found[0] != first:
            raise StoreError(f"{store.url}: what was written is not what is read, so no result would be safe there")
        store.replace(path, second, found[1])
        if store.get(path) != second:
            raise StoreError(f"{store.url}: a read after a write gives old bytes, so no result would be safe there")
        _must_conflict(store, "a stale compare-and-swap overwrites", lambda: store.replace(path, first, found[1]))
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
        f"{store.url}: this store has no conditional writes ({broken}), so two runs could destroy each other's "
        "results; use one that has them, such as AWS S3 or SeaweedFS"
    )
