"""Files behind URLs: the identity of their content when a run is planned, and a download of exactly that content.

Works with any fsspec filesystem. An identity is the version that the filesystem reports (`ETag "9a03", 120 bytes`) or,
if it reports none, the SHA-256 of the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_core.artifacts.manifest import file_digest
from rlhf_core.errors import StageError, did_you_mean, reason_of
from rlhf_core.system.paths import file_problem

MAX_HASHED_BYTES = 2**30  # of a remote file that has no version: planning a run reads it whole

# What filesystems call the version of a file, the most exact first: S3 and HTTP, GCS and Azure, GCS, Azure, HTTP, the
# Hugging Face hub. A time alone is too coarse, so Last-Modified counts with the size only.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id")
_CHUNK = 2**20
_SHA256 = "sha256 "


class UnreadableError(Exception):
    """A URL that cannot be read now; its text is the reason."""


def file_identity(url: str) -> str:
    """Return an identity that changes with the content of the file at `url`. Raises UnreadableError."""
    with _filesystem(url) as (filesystem, path):
        return _identity(filesystem, path)


def folder_identity(url: str, suffixes: tuple[str, ...]) -> str:
    """Return JSON of name -> identity of each file in the folder at `url` with one of the suffixes.

    Raises UnreadableError, also if there is no such file.
    """
    with _filesystem(url) as (filesystem, root):
        names = _names(filesystem, root, suffixes)
        return json.dumps({name: _identity(filesystem, f"{root.rstrip('/')}/{name}") for name in names})


def fetch_file(url: str, pinned: str | None, target: Path) -> None:
    """Copy the file at `url` to `target`.

    pinned: its identity when the run was planned, if it was pinned.
    Raises StageError if its content has changed, or if it cannot be read.
    """
    try:
        with _filesystem(url) as (filesystem, path):
            _fetch(filesystem, path, url, pinned, target)
    except UnreadableError as error:
        raise StageError(f"{url}: cannot be read ({error})") from error


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Convert errors of reading `url` without a copy to StageError."""
    try:
        yield
    except aiohttp.ClientError as error:
        raise StageError(f"{url}: cannot be read ({type(error).__name__}: {reason_of(error)})") from error


def require_unchanged(url: str, pinned: str | None) -> None:
    """After reading without a copy: raise StageError if the version differs from `pinned`, its identity when the run
    was planned, or cannot be read.
    """
    if pinned is not None:
        try:
            with _filesystem(url) as (filesystem, path):
                _require(_version(filesystem.info(path)), pinned, url)
        except UnreadableError as error:
            raise StageError(f"{url}: cannot be read ({error})") from error


def is_versioned(identity: str) -> bool:
    """Return whether the filesystem reports a version by which content is compared with the planned one."""
    return not identity.startswith(_SHA256)


def fetch_folder(url: str, pinned: str | None, suffixes: tuple[str, ...], target: Path) -> None:
    """Copy the files listed by `folder_identity` to the new folder `target`: the pinned ones, else the current ones.

    Raises StageError as `fetch_file` does.
    """
    target.mkdir()
    try:
        with _filesystem(url) as (filesystem, root):
            files: Mapping[str, str | None] = (
                dict.fromkeys(_names(filesystem, root, suffixes)) if pinned is None else json.loads(pinned)
            )
            for name, identity in files.items():
                shown = f"{url.rstrip('/')}/{name}"
                _fetch(filesystem, f"{root.rstrip('/')}/{name}", shown, identity, target / name)
    except UnreadableError as error:
        raise StageError(f"{url}: cannot be read ({error})") from error


@contextmanager
def _filesystem(url: str) -> Iterator[tuple[Any, str]]:
    """Yield an uncached filesystem, and the path in it. Its errors become UnreadableError."""
    options: dict[str, Any] = {"skip_instance_cache": True}
    if url.startswith(("http://", "https://")):
        # aiohttp would end every download after five minutes.
        options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)}
    chain, _, rest = url.partition("://")
    protocol = chain.rpartition("::")[2]
    if protocol not in (protocols := fsspec.available_protocols()):
        raise UnreadableError(f"there is no protocol `{protocol}`{did_you_mean(protocol.lower(), protocols)}")
    if protocol in LocalFileSystem.protocol and not rest.startswith("/"):
        # Else it is read from the folder that the process happens to be in.
        raise UnreadableError(f"write {protocol}:///… with the whole path, or the path alone, without {protocol}://")
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
        filesystem.invalidate_cache()
        yield filesystem, path
    except (StageError, UnreadableError):
        raise
    except ImportError as error:
        raise UnreadableError(f"its protocol needs a package: {error}") from error
    except Exception as error:  # each filesystem raises types of its own; all mean that the URL cannot be read
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            raise UnreadableError("there is no such file or folder") from error
        reason = error.__cause__ or error
        raise UnreadableError(f"{type(reason).__name__}: {reason}") from error


def _names(filesystem: Any, root: str, suffixes: tuple[str, ...]) -> list[str]:
    names = sorted(path.rstrip("/").rpartition("/")[2] for path in filesystem.ls(root, detail=False))
    matching = [name for name in names if name.endswith(suffixes)]
    filesystem.invalidate_cache()  # a listing may write versions in another way than a look-up of one file
    if not matching:
        raise UnreadableError(f"there is no file that ends in {', '.join(suffixes)}")
    return matching


def _identity(filesystem: Any, path: str) -> str:
    problem = file_problem(Path(path)) if isinstance(filesystem, LocalFileSystem) else None
    if problem:  # a pipe might never answer
        raise UnreadableError(problem)
    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise UnreadableError("is a folder; name the files in it")
    return _version(info) or _content_hash(filesystem, path)


def _version(info: Mapping[str, Any]) -> str | None:
    """Return the filesystem's version of the file, with its size; None if it reports none."""
    size = info.get("size")
    shown_size = "" if size is None else f", {size} bytes"
    for name in _VERSIONS:
        if info.get(name):
            return f"{name} {info[name]}{shown_size}"
    if info.get("Last-Modified") and size is not None:
        return f"Last-Modified {info['Last-Modified']}{shown_size}"
    return None


def _content_hash(filesystem: Any, path: str) -> str:
    bounded = not isinstance(filesystem, LocalFileSystem)
    digest, size = hashlib.sha256(), 0
    with filesystem.open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if bounded and size > MAX_HASHED_BYTES:
                raise UnreadableError(
                    f"its server reports no ETag or other version, and it is larger than the {MAX_HASHED_BYTES} bytes "
                    "that are read to hash a file: copy it to a store with ETags, or to a local file"
                )
    return f"{_SHA256}{digest.hexdigest()}"


def _fetch(filesystem: Any, path: str, url: str, pinned: str | None, target: Path) -> None:
    versioned = pinned is not None and is_versioned(pinned)
    if versioned:
        _require(_version(filesystem.info(path)), pinned, url)  # before what may be a long download
    filesystem.get_file(path, str(target))
    if versioned:
        filesystem.invalidate_cache()
        _require(_version(filesystem.info(path)), pinned, url)
    elif pinned is not None:
        _require(f"{_SHA256}{file_digest(target)}", pinned, url)


def _require(now: str | None, pinned: str | None, url: str) -> None:
    if now != pinned:
        raise StageError(
            f"{url}: the content changed since the run was planned (then {pinned}, now {now or 'without a version'}): "
            "run again, so that it is planned with the new content"
        )
