"""The bottom layer: bytes under paths, with the two conditional writes on which everything above rests.

Needed are read-after-write, put-if-absent and compare-and-swap; not relied on are rename, listing order, the meaning of
an ETag, and bucket versions.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from rlhf_core.errors import ConflictError, StoreError

STORE_VARIABLE = "ALIGNMENT_STORE"


class Store(Protocol):
    """Paths are relative and posix. Whatever goes wrong below is a StoreError in one sentence."""

    url: str

    def get(self, path: str) -> bytes | None:
        """The bytes at `path`, or None if there are none."""

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        """The bytes at `path` and the tag of this version of them, for `replace`."""

    def put(self, path: str, data: bytes) -> None:
        """Write whatever was there before."""

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Raises ConflictError if something is there already. Of many at once, one succeeds."""

    def replace(self, path: str, data: bytes, tag: str) -> None:
        """Compare-and-swap: raises ConflictError unless what is there has `tag`."""

    def put_file_if_absent(self, path: str, local: Path) -> bool:
        """Upload a file of any size; False if something was there already. Never half there."""

    def get_file(self, path: str, local: Path) -> None:
        """Download to `local`. Raises StoreError if there is nothing at `path`."""

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str) -> Iterator[str]:
        """Paths of everything below the folder `prefix`, in any order."""

    def delete(self, path: str) -> None:
        """Remove what is there, if anything is."""

    def probe(self) -> None:
        """Raises StoreError, with the reason, if this store cannot keep the contract."""


def open_store(url: str) -> Store:
    """`s3://bucket/prefix` (endpoint and credentials from the usual AWS_* variables) or a local folder."""
    from rlhf_core.artifacts.local_store import LocalStore
    from rlhf_core.artifacts.s3_store import S3Store

    if url.startswith("s3://"):
        return S3Store(url)
    if "://" in url and not url.startswith("file://"):
        raise StoreError(f"{url}: a store is s3://bucket/prefix or a local folder")
    return LocalStore(Path(url.removeprefix("file://")))


def store_url() -> str:
    """The store that the environment names. Raises StoreError if it names none."""
    url = os.environ.get(STORE_VARIABLE)
    if not url:
        raise StoreError(f"{STORE_VARIABLE} is not set: run `alignment up`, or set it to s3://bucket or a folder")
    return url


def probe_contract(store: Store) -> None:
    """Try both conditional writes on a path of its own: a store that ignores the condition would overwrite artifacts."""
    path = f"probe/{secrets.token_hex(8)}"
    try:
        store.put_if_absent(path, b"first")
        if _succeeds(lambda: store.put_if_absent(path, b"second")):
            raise StoreError(f"{store.url}: the store ignores put-if-absent (If-None-Match); artifacts would not be safe there")
        read = store.get_tagged(path)
        if read is None or read[0] != b"first":
            raise StoreError(f"{store.url}: what was written cannot be read back at once")
        store.replace(path, b"third", read[1])
        if _succeeds(lambda: store.replace(path, b"fourth", read[1])):
            raise StoreError(f"{store.url}: the store ignores compare-and-swap (If-Match); leases and aliases need it")
    finally:
        store.delete(path)


def _succeeds(write: Callable[[], None]) -> bool:
    try:
        write()
    except ConflictError:
        return False
    return True
