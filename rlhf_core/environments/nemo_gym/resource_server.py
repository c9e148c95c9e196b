"""Sessions at resource servers of NeMo Gym: JSON by POST, with cookies that identify the session.

A connection is opened for each request: minutes may pass between two, in which a server closes idle ones, and a call
that reached a closing connection could not be sent again, since it may have had its effect.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlhf_core.config.environments.nemo_gym import ResourceServers
from rlhf_core.errors import EpisodeError, reason_of
from rlhf_core.rewards.servers import Address, addresses, headers, shown
from rlhf_core.system.json_text import JSONTextError, parse_json

_LARGEST_ANSWER = 2**24  # bytes: that to `verify` repeats the whole episode
_CONNECT_SECONDS = 10.0
_MAX_PAUSE = 10.0  # seconds between two attempts
_NOT_TAKEN = (429, 503)  # statuses of requests that had no effect


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: bytes
    server: str  # its name in errors

    def text(self) -> str:
        """The body as text. Raises EpisodeError if it is not text."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            raise EpisodeError(f"{self.server} did not answer with text: {shown(self.content)!r}") from error

    def mapping(self) -> dict[str, Any]:
        """Parse the body as a JSON mapping. Raises EpisodeError if it is not one."""
        try:
            value = parse_json(self.text())
        except JSONTextError as error:
            raise EpisodeError(f"{self.server} did not answer with JSON: {shown(self.content)!r}") from error
        if not isinstance(value, dict):
            raise EpisodeError(f"{self.server} answered {shown(self.content)!r}, expected a mapping")
        return value


class Sessions:
    """The sessions of a stage, distributed round-robin over all servers."""

    def __init__(self, config: ResourceServers) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._servers = [
            _Server(address, config.requests_per_server) for address in addresses("resource server", config)
        ]
        self._turns = itertools.cycle(self._servers)
        self._headers = headers(config)

    def new(self) -> Session:
        """Create the session of an episode. Call it in the event loop that plays the episode."""
        return Session(self._config, next(self._turns), self._headers)


class Session:
    def __init__(self, config: ResourceServers, server: _Server, headers: Mapping[str, str]) -> None:
        self._config, self._server, self._headers = config, server, headers
        self._cookies = aiohttp.CookieJar(unsafe=True)  # unsafe: also of servers without a name, by their IP address

    async def post(self, path: str, body: Any) -> Answer:
        """Return the response, whatever its status, unless the request was not accepted or is redirected.

        Raises EpisodeError, which names the server and the path.
        """
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=_MAX_PAUSE),
            retry=retry_if_exception_type(_NotTakenError),
            reraise=True,
        )
        return await retrying(self._sent, path, body)

    async def _sent(self, path: str, body: Any) -> Answer:
        name, limit = f"{self._server.address.name}, /{path},", self._config.timeout_seconds
        try:
            async with self._server.free_request():
                status, kind, content = await self._received(f"{self._server.address.url.rstrip('/')}/{path}", body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotTakenError(f"{name} cannot be reached: {type(error).__name__}: {reason_of(error)}") from error
        except TimeoutError as error:
            raise EpisodeError(f"{name} did not answer within {limit:g} s") from error
        except aiohttp.ClientConnectionError as error:
            raise EpisodeError(f"{name} broke the connection: {type(error).__name__}: {reason_of(error)}") from error
        except aiohttp.ClientError as error:
            raise EpisodeError(
                f"{name} sent an invalid HTTP response: {type(error).__name__}: {reason_of(error)}"
            ) from error
        if len(content) > _LARGEST_ANSWER:
            raise EpisodeError(f"{name} answered with more than {_LARGEST_ANSWER // 2**20} MiB")
        if status in _NOT_TAKEN:
            raise _NotTakenError(f"{name} answered with status {status}: {shown(content)}")
        if 300 <= status < 400:
            raise EpisodeError(
                f"{name} answered with status {status}, a redirect, which is not followed: give the address it leads to"
            )
        if kind == "text/html":  # such as a proxy's page to log in
            raise EpisodeError(f"{name} answered with a web page: {shown(content)!r}")
        return Answer(status, content, name)

    async def _received(self, url: str, body: Any) -> tuple[int, str, bytes]:
        """Return status, content type and body, which is read little beyond the limit."""
        limits = aiohttp.ClientTimeout(
            total=self._config.timeout_seconds, sock_connect=min(self._config.timeout_seconds, _CONNECT_SECONDS)
        )
        # Compressed content could be a thousand times as large: it is not requested, and not unpacked.
        sent = {**self._headers, "Accept-Encoding": "identity"}
        client = aiohttp.ClientSession(
            cookie_jar=self._cookies, timeout=limits, auto_decompress=False, trust_env=True, headers=sent
        )
        async with client, client.post(url, json=body, allow_redirects=False) as response:
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > _LARGEST_ANSWER:
                    break
            return response.status, response.content_type, bytes(content)


class _Server:
    def __init__(self, address: Address, requests: int) -> None:
        self.address = address
        self._requests = requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(requests)

    def free_request(self) -> asyncio.Semaphore:
        """Return the semaphore to hold during a request. One per event loop: later steps may have another."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._requests)
        return self._free


class _NotTakenError(EpisodeError):
    """The request had no effect: it may be retried."""
