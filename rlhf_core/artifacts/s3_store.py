"""The contract on any S3-compatible bucket, through s3fs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import botocore.exceptions
import s3fs
from fsspec.asyn import sync
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from rlhf_core.artifacts.store import probe_contract
from rlhf_core.errors import ConflictError, StoreError

T = TypeVar("T")

_CONNECT_SECONDS = 5
_PRECONDITION_FAILED, _CONFLICTING_OPERATION = 412, 409


class S3Store:
    def __init__(self, url: str) -> None:
        """url: s3://bucket or s3://bucket/prefix; AWS_ENDPOINT_URL and the other AWS_* variables say where and who."""
        self.url = url.rstrip("/")
        self._bucket, _, self._prefix = self.url.removeprefix("s3://").partition("/")
        self._fs = s3fs.S3FileSystem(
            use_listings_cache=False,  # another process may write at any time
            skip_instance_cache=True,
            config_kwargs={"connect_timeout": _CONNECT_SECONDS, "retries": {"max_attempts": 3, "mode": "standard"}},
        )
        self._fs.retries = 2  # of s3fs itself, on top of botocore's

    def get(self, path: str) -> bytes | None:
        read = self.get_tagged(path)
        return None if read is None else read[0]

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        async def read() -> tuple[bytes, str]:
            # Body and tag of one response: two requests might see two versions.
            response = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=self._key(path))
            async with response["Body"] as body:
                return await body.read(), response["ETag"]

        try:
            return self._do(lambda: sync(self._fs.loop, read))
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes) -> None:
        self._put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._put(path, data, IfNoneMatch="*")

    def replace(self, path: str, data: bytes, tag: str) -> None:
        self._put(path, data, IfMatch=tag)

    def _put(self, path: str, data: bytes, **condition: str) -> None:
        self._do(
            lambda: self._fs.call_s3("put_object", Bucket=self._bucket, Key=self._key(path), Body=data, **condition)
        )

    def put_file_if_absent(self, path: str, local: Path) -> bool:
        if self.exists(path):
            return False
        try:
            self._do(lambda: self._fs.put_file(str(local), self._full(path), mode="create"))
        except ConflictError:
            return False
        return True

    def get_file(self, path: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._do(lambda: self._fs.get_file(self._full(path), str(local)))
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}/{path} is not there") from error

    def exists(self, path: str) -> bool:
        try:
            self._do(lambda: self._fs.call_s3("head_object", Bucket=self._bucket, Key=self._key(path)))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[str]:
        start = len(self._full(""))
        for path in self._do(lambda: self._fs.find(self._full(prefix))):
            yield path[start:]

    def delete(self, path: str) -> None:
        self._do(lambda: self._fs.call_s3("delete_object", Bucket=self._bucket, Key=self._key(path)))

    def probe(self) -> None:
        try:
            self._do(lambda: self._fs.call_s3("head_bucket", Bucket=self._bucket))
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}: there is no bucket `{self._bucket}` at this endpoint; create it first") from error
        probe_contract(self)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _full(self, path: str) -> str:
        return f"{self._bucket}/{self._key(path)}"

    def _do(self, call: Callable[[], T]) -> T:
        """`call`, its errors told apart: what is not there, a lost condition, everything else.

        Raises FileNotFoundError, ConflictError or StoreError.
        """
        conflicting = retry_if_exception(lambda error: _status(error) == _CONFLICTING_OPERATION)
        retrying = Retrying(retry=conflicting, stop=stop_after_attempt(5), wait=wait_exponential_jitter(0.1, 2), reraise=True)
        try:
            return retrying(call)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise StoreError(f"{self.url}: there is no bucket `{self._bucket}` at this endpoint; create it first") from error
            raise
        except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            if _status(error) == _PRECONDITION_FAILED:
                raise ConflictError(f"{self.url}: the object exists already, or changed since it was read") from error
            raise StoreError(f"{self.url}: {self._reason(error)}") from error

    def _reason(self, error: BaseException) -> str:
        causes = list(_chain(error))
        if any(isinstance(cause, botocore.exceptions.EndpointConnectionError | botocore.exceptions.ConnectTimeoutError | ConnectionError) for cause in causes):  # fmt: skip
            endpoint = self._fs.client_kwargs.get("endpoint_url") or self._fs.endpoint_url or "the endpoint"
            return f"cannot reach {endpoint}; is the server up, and AWS_ENDPOINT_URL right?"
        if any(isinstance(cause, botocore.exceptions.NoCredentialsError) for cause in causes):
            return "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        if _status(error) in (401, 403) or isinstance(error, PermissionError):
            return "the server refuses these credentials; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return f"{type(error).__name__}: {error}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _response(error: BaseException) -> dict[str, Any]:
    """What the server said. s3fs turns botocore's errors into OSErrors and keeps them as the cause."""
    for cause in _chain(error):
        if isinstance(cause, botocore.exceptions.ClientError):
            return dict(cause.response)
    return {}


def _status(error: BaseException) -> int | None:
    status: int | None = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _code(error: BaseException) -> str | None:
    code: str | None = _response(error).get("Error", {}).get("Code")
    return code
