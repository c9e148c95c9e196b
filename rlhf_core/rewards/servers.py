"""Client of reward and judge servers: JSON by POST, distributed over several servers, with retries where safe."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlhf_core.config.servers import ServerConfig, check_url
from rlhf_core.errors import RewardError, VariableError, reason_of
from rlhf_core.system.variables import header_of

T = TypeVar("T")
R = TypeVar("R")

_MAX_QUOTED = 500  # characters of an answer in an error message
_MAX_PAUSE = 10.0  # seconds between two attempts
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    name: str  # for errors: without possible secrets


@dataclass(eq=False, slots=True)
class _Server:
    address: Address
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    content: bytes
    server: str  # its name in errors

    def json(self) -> Any:
        """Parse the response. Raises RewardError, with its beginning, if it is not JSON."""
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise RewardError(f"{self.server} did not answer with JSON: {self.shown!r}") from error

    @property
    def shown(self) -> str:
        return shown(self.content)


class Servers:
    """Several equivalent servers.

    Requests have no side effects, so they are retried if there is no connection, it breaks, or the status is 429 or
    5xx: by the next server at once, and by all again after a pause. Any other failure, such as a timeout, raises
    RewardError at once.
    """

    def __init__(self, what: str, config: ServerConfig, path: str = "") -> None:
        """what: prefix of their names in errors; path: appended to each URL.

        Raises RewardError if an environment variable that the config names is not set or not valid.
        """
        self._config = config
        self._servers = [_Server(address) for address in addresses(what, config, path)]
        self._lock = threading.Lock()
        self._unreachable: set[_Server] = set()
        self._client = httpx.Client(
            timeout=httpx.Timeout(config.timeout_seconds, connect=min(config.timeout_seconds, _CONNECT_SECONDS)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers=headers(config),
        )

    @property
    def name(self) -> str:
        """Name of all of them, for errors."""
        return ", ".join(server.address.name for server in self._servers)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Map `function`, which calls `post`, over the items, concurrently up to the servers' limit. Keeps the order.

        Unreachable servers are tried again. Raises the error of the first function that fails.
        """
        self._unreachable.clear()
        if not items:
            return []
        at_once = min(len(items), self._config.requests_per_server * len(self._servers))
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def metrics(self) -> dict[str, float]:
        """Number of servers that the last `map` could not reach, if there are several servers."""
        return {"unreachable_servers": float(len(self._unreachable))} if len(self._servers) > 1 else {}

    def post(self, request: Mapping[str, Any]) -> Answer:
        """Send a request. Raises RewardError, which names the server."""
        retrying = Retrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=_MAX_PAUSE),
            retry=retry_if_exception_type(TransientError),
            reraise=True,
        )
        return retrying(self._round, request)

    def close(self) -> None:
        self._client.close()

    def _round(self, request: Mapping[str, Any]) -> Answer:
        """Try one server after the other, reachable and less busy ones first, until one responds."""
        left = list(self._servers)
        while True:
            with self._lock:
                server = min(left, key=lambda server: (server in self._unreachable, server.in_flight))
                server.in_flight += 1
            left.remove(server)
            try:
                return Answer(self._sent(server, request), server.address.name)
            except TransientError:
                if not left:
                    raise
            finally:
                with self._lock:
                    server.in_flight -= 1

    def _sent(self, server: _Server, request: Mapping[str, Any]) -> bytes:
        """Return the response body. Raises TransientError if a retry may succeed, else RewardError."""
        name, limit = server.address.name, self._config.timeout_seconds
        try:
            status, body = self._received(server, request)
        except httpx.ConnectError as error:
            self._unreachable.add(server)
            raise TransientError(f"{name} cannot be reached: {type(error).__name__}: {reason_of(error)}") from error
        except httpx.ConnectTimeout as error:
            self._unreachable.add(server)
            raise TransientError(f"{name} cannot be reached within {_CONNECT_SECONDS:g} s") from error
        except httpx.TimeoutException as error:
            raise RewardError(f"{name} did not answer within {limit:g} s ({type(error).__name__})") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise TransientError(f"{name} broke the connection: {type(error).__name__}: {reason_of(error)}") from error
        except httpx.RequestError as error:
            raise RewardError(f"{name} cannot be asked: {type(error).__name__}: {reason_of(error)}") from error
        if 200 <= status < 300:
            return body
        kind = TransientError if status in (408, 429) or status >= 500 else RewardError
        redirect = " (a redirect, which is not followed: give the address it leads to)" if 300 <= status < 400 else ""
        raise kind(f"{name} answered with status {status}{redirect}: {shown(body)}")

    def _received(self, server: _Server, request: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return status and body. httpx limits the time of each part of a response; this limits that of all of them."""
        deadline = time.monotonic() + self._config.timeout_seconds
        with self._client.stream("POST", server.address.url, json=request) as response:
            parts = []
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer comes too slowly")
            return response.status_code, b"".join(parts)


class TransientError(RewardError):
    """A retry may succeed."""


def shown(content: bytes) -> str:
    """Return the beginning of a response, for errors."""
    return content[: 4 * _MAX_QUOTED].decode(errors="replace")[:_MAX_QUOTED]


def addresses(what: str, config: ServerConfig, path: str = "") -> Iterator[Address]:
    """Yield the addresses of all servers. what: prefix of their names in errors; path: appended to each URL.

    Raises RewardError if the environment variable that the config names is not set, or holds no URL.
    """
    if config.url_variable is None:
        for url in config.urls if config.url is None else (config.url,):
            yield Address(_joined(url, path), f"{what} {url}")
        return
    urls = _variable(config.url_variable).split()
    for number, url in enumerate(urls, start=1):
        try:
            check_url(url)
        except ValueError as error:
            raise RewardError(
                f"the environment variable {config.url_variable} is not a valid URL of a server: {error}"
            ) from error
        place = f" (URL {number} of {len(urls)})" if len(urls) > 1 else ""
        yield Address(_joined(url, path), f"{what} of {config.url_variable}{place}")


def _joined(url: str, path: str) -> str:
    return f"{url.rstrip('/')}{path}" if path else url


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise RewardError(f"the environment variable {name}, which the recipe names, is not set in this job")
    return value


def headers(config: ServerConfig) -> dict[str, str]:
    """Return the headers of requests.

    Raises RewardError if the environment variable that the config names holds no header.
    """
    if config.header_variable is None:
        return {}
    try:
        return header_of(config.header_variable)
    except VariableError as error:
        raise RewardError(str(error)) from error
