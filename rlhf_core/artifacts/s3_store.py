"""A store on an S3 server, using s3fs. Errors are distinguished by the server's code, not by s3fs's errno."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from rlhf_core.artifacts.s3_settings import WaitingNote, check_settings, client_problem, endpoint, is_lasting, region
from rlhf_core.artifacts.store import Entries, Entry, Paths, Store, checked_path, not_written, probe_contract
from rlhf_core.errors import ConflictError, StoreError, reason_of
from rlhf_core.system.paths import FULL

# Long enough for a restart of the server, short enough that a run does not hang if the server is gone.
_PATIENCE_SECONDS = 60.0
# However long they took: a process that was suspended during a request finds it timed out, and the server well.
_ATTEMPTS = 3
_READ_SECONDS = 60.0
_HURRIED_READ_SECONDS = 15.0
_SLOWEST_UPLOAD = 2**20  # bytes per second
_TRANSIENT_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_WRONG_CREDENTIALS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"})
_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_PROBE = "probe/"
_SIGNED_SECONDS = 7 * 24 * 3600
_CHUNK = 2**20
_PASSING = (BotoConnectionError, HTTPClientError, TimeoutError, ConnectionError, aiohttp.ClientError)
# botocore raises a ValueError for an endpoint that is no URL.
_FAILURES = (OSError, BotoCoreError, ClientError, aiohttp.ClientError, ResponseParserError, ValueError)


class S3Store(Store):
    """Tags are ETags, which are treated as opaque. Listings are never cached."""

    def __init__(self, url: str, *, hurried: bool = False):
        """hurried: fail within seconds, because a person is waiting."""
        self.url = url.rstrip("/")
        self._bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not self._bucket:
            raise StoreError(f"{url}: write the store as s3://bucket or s3://bucket/prefix")
        check_settings(url)
        self._prefix = f"{checked_path(prefix)}/" if prefix else ""
        persistent = stop_after_delay(_PATIENCE_SECONDS) & stop_after_attempt(_ATTEMPTS)
        self._stop = stop_after_attempt(1) if hurried else persistent
        # The whole call may take much longer than the server's part of it: a busy machine has been seen to need ten
        # seconds for the client's own set-up, and the server then counted as unreachable.
        self._timeout = 2 * _READ_SECONDS
        self._s3 = _open(connect_timeout=10, read_timeout=_HURRIED_READ_SECONDS if hurried else _READ_SECONDS)

    def __reduce__(self) -> tuple[type[S3Store], tuple[str]]:
        return S3Store, (self.url,)

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        content_and_tag: tuple[bytes, str] | None = self._get(path, self._read)
        return content_and_tag

    async def _read(self, key: str) -> tuple[bytes, str]:
        # One request, so that the tag belongs to these bytes.
        response = await self._s3._call_s3("get_object", Bucket=self._bucket, Key=key)
        async with response["Body"] as body:
            return await body.read(), response["ETag"]

    def put(self, path: str, data: bytes) -> None:
        self._call(path, self._s3._pipe_file, self._full(path), data)

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._call(path, self._s3._pipe_file, self._full(path), data, mode="create")

    def replace(self, path: str, data: bytes, tag: str) -> None:
        try:
            self._request("put_object", path, Body=data, IfMatch=tag)
        except StoreError as error:
            if _code(error.__cause__) == "NoSuchKey":  # AWS's response where other servers return 412
                raise ConflictError(f"{self.url}: {path} is gone since it was read") from error
            raise

    def put_file_if_absent(self, path: str, local_path: Path) -> bool:
        if self.exists(path):
            return False
        limit = self._timeout + local_path.stat().st_size / _SLOWEST_UPLOAD
        try:
            self._call(path, self._s3._put_file, str(local_path), self._full(path), mode="create", timeout=limit)
        except ConflictError:
            return False
        return True

    def get_file(self, path: str, local_path: Path) -> None:
        try:
            self._call(path, self._s3._get_file, self._full(path), str(local_path), timeout=None)
        except StoreError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
                raise not_written(local_path, error.__cause__) from error
            raise

    def get_range(self, path: str, start: int, size: int) -> bytes | None:
        async def read(key: str) -> bytes:
            wanted = f"bytes={start}-{start + size - 1}"
            response = await self._s3._call_s3("get_object", Bucket=self._bucket, Key=key, Range=wanted)
            async with response["Body"] as body:
                content: bytes = await body.read()
                return content

        try:
            content: bytes | None = self._get(path, read)
        except StoreError as error:
            if error.__cause__ is not None and _status(error.__cause__) == 416:  # it ends before `start`
                return b""
            raise
        return content

    def hashed(self, path: str) -> tuple[str, int] | None:
        digest_and_size: tuple[str, int] | None = self._get(path, self._hash, timeout=None)
        return digest_and_size

    async def _hash(self, key: str) -> tuple[str, int]:
        response = await self._s3._call_s3("get_object", Bucket=self._bucket, Key=key)
        digest, size = hashlib.sha256(), 0
        async with response["Body"] as body:
            while chunk := await body.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return digest.hexdigest(), size

    def move(self, path: str, target: str) -> None:
        self._call(path, self._s3._copy, self._full(path), self._full(target), timeout=None)
        self.delete(path)

    def exists(self, path: str) -> bool:
        try:
            self._request("head_object", path)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # the response to HEAD has no body with a code
                return False
            raise
        return True

    def list(self, prefix: str) -> Paths:
        return [entry.path for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Entries:
        root = f"{self._bucket}/{self._prefix}"
        folder, _, start = f"{root}{prefix}".rpartition("/")
        names = self._call(prefix, self._s3._find, folder, prefix=start, detail=True, timeout=None)
        # Some servers store folders, and s3fs returns an empty folder itself as its content.
        return [
            Entry(name.removeprefix(root), stored["size"], stored["LastModified"], stored["ETag"])
            for name, stored in sorted(names.items())
            if name.startswith(root + prefix) and not name.endswith("/")
        ]

    def delete(self, path: str) -> None:
        self._request("delete_object", path)

    def page_url(self, path: str) -> str:
        """Return a URL signed for the longest time that servers allow. It ends earlier if the credentials do."""
        signed: str = self._call(
            path,
            self._s3._url,
            self._full(path),
            expires=_SIGNED_SECONDS,
            ResponseContentType="text/html; charset=utf-8",
        )
        return signed

    def reach(self) -> None:
        S3Store(self.url, hurried=True)._reach()

    def probe(self) -> None:
        hurried = S3Store(self.url, hurried=True)
        hurried._reach()
        probe_contract(hurried)

    def _reach(self) -> None:
        # Before a first write, because some servers create a missing bucket then. Both requests, because the response
        # to HEAD has no reason, and some servers return an empty listing for a missing bucket.
        prefix = f"{self._prefix}{_PROBE}"
        self._call(_PROBE, self._s3._call_s3, "list_objects_v2", Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        self._call(_PROBE, self._s3._call_s3, "head_bucket", Bucket=self._bucket)

    def _key(self, path: str) -> str:
        return f"{self._prefix}{checked_path(path)}"

    def _full(self, path: str) -> str:
        return f"{self._bucket}/{self._key(path)}"

    def _get(self, path: str, reader: Callable[..., Any], timeout: float | None = -1) -> Any:
        """Return `reader` of the object; None if there is none."""
        try:
            return self._call(path, reader, self._key(path), timeout=timeout)
        except StoreError as error:
            # s3fs raises FileNotFoundError for a missing bucket too, which must not look like a missing object: every
            # stage would be recomputed.
            if _code(error.__cause__) == "NoSuchKey":
                return None
            raise

    def _request(self, method: str, path: str, **arguments: Any) -> None:
        self._call(path, self._s3._call_s3, method, Bucket=self._bucket, Key=self._key(path), **arguments)

    def _call(
        self, path: str, function: Callable[..., Any], *args: Any, timeout: float | None = -1, **kwargs: Any
    ) -> Any:
        """Call `function` of s3fs with retries of transient errors. The cause of a StoreError is s3fs's error.

        timeout: in seconds; None for downloads of any size. The client's own timeouts do not cover a server that stops
        responding before it has read the body of a request.
        """
        limit = self._timeout if timeout == -1 else timeout
        try:
            return Retrying(
                retry=retry_if_exception(_is_transient),
                stop=self._stop,
                wait=wait_random_exponential(multiplier=0.1, max=2.0),
                before_sleep=WaitingNote(),
                reraise=True,
            )(sync, self._s3.loop, function, *args, timeout=limit, **kwargs)
        except _FAILURES as error:
            raise self._explained(path, error) from error

    def _explained(self, path: str, error: Exception) -> StoreError:
        code, status = _code(error), _status(error)
        variable, server = endpoint()
        if status == 412:
            return ConflictError(f"{self.url}: {path} exists already, or has changed since it was read")
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreError(f"the store needs credentials: set {_CREDENTIALS}")
        if code == "NoSuchBucket" or (status == 404 and path == _PROBE):
            return StoreError(f"there is no bucket `{self._bucket}` at {server}: create it, or correct the store's URL")
        if code in _WRONG_CREDENTIALS:
            return StoreError(f"{server} rejects the credentials ({code}): correct {_CREDENTIALS}")
        if status == 403:
            return StoreError(f"{server} refuses these credentials the bucket `{self._bucket}`: correct {_CREDENTIALS}")
        if status == 404:
            return StoreError(f"{self.url} has no object {path}")
        if status == 501:
            return StoreError(
                f"{self.url}: the server does not support this request ({reason_of(error)}): use another store"
            )
        if (problem := client_problem(error, server)) is not None:
            return StoreError(problem)
        if isinstance(error, ParamValidationError):
            return StoreError(f"{self.url}: `{self._bucket}` is not a valid bucket name: correct the store's URL")
        if isinstance(error, ResponseParserError) or (status is not None and not code.strip("0123456789")):
            return StoreError(f"what answers at {server} is not an S3 server: correct {variable} ({reason_of(error)})")
        if isinstance(error, ValueError):
            return StoreError(f"{variable}={server} is not an address of a server, such as http://host:8333")
        if status is None and _is_transient(error):
            return StoreError(f"no S3 server answers at {server} ({reason_of(error)}): start it or correct {variable}")
        return StoreError(f"the store {self.url} fails at `{path}`: {reason_of(error)}")


def _open(*, connect_timeout: float, read_timeout: float) -> s3fs.S3FileSystem:
    name = region()
    filesystem = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        # botocore reads AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 and the credentials itself, but not AWS_REGION.
        client_kwargs={"region_name": name} if name else {},
        config_kwargs={
            "signature_version": "s3v4",  # of signed URLs too, whose default AWS accepts in its old regions alone
            "connect_timeout": connect_timeout,
            "read_timeout": read_timeout,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        },
    )
    filesystem.retries = 1  # transient errors are retried in one place, `S3Store._call`
    return filesystem


def _response(error: BaseException | None) -> dict[str, Any]:
    """Return the server's response: s3fs raises an OSError of its own from botocore's."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__
    return dict(error.response) if isinstance(error, ClientError) else {}


def _code(error: BaseException | None) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int | None:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return None if status is None else int(status)


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    return isinstance(error, _PASSING) and not is_lasting(error)
