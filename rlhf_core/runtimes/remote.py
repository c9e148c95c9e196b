"""Runtimes of a service: JSON by POST to `/runtimes` and below (docs/reference/runtimes.md)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlhf_core.config.environments.runtimes import RemoteRuntime
from rlhf_core.errors import EpisodeError, reason_of
from rlhf_core.rewards.servers import Address, addresses, headers, shown
from rlhf_core.runtimes.base import MOST_OUTPUT, MOST_READ, Image, Ran, Runtime, RuntimeHost

_MOST_ANSWER = 2 * MOST_READ  # bytes
_CONNECT_SECONDS = 10.0
_MAX_PAUSE = 10.0  # seconds between two attempts
_NOT_TAKEN = (429, 503)  # statuses of requests that had no effect
_LIMITS = ("", "time", "memory", "files")


class _NotTakenError(EpisodeError):
    """The request had no effect, and can be sent again."""


class RemoteRuntimes(RuntimeHost):
    name = "remote"

    @classmethod
    def of(cls, config: RemoteRuntime) -> RemoteRuntimes:
        return cls(config)

    def __init__(self, config: RemoteRuntime) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._headers = headers(config)
        services = [
            _Service(config, address, self._headers) for address in addresses("runtime service", config, "/runtimes")
        ]
        self._services = itertools.cycle(services)
        self._stops = ThreadPoolExecutor(8)
        self._stopping: list[Future[None]] = []

    async def start(self, image: Image) -> Runtime:
        service = next(self._services)
        asked = {
            "image": image.name or (None if image.builds else self._config.image),
            "context": _encoded(image.context), "variables": dict(image.variables),
        }  # fmt: skip
        identity = (await service.post("", asked)).get("runtime")
        if not isinstance(identity, str) or not identity:
            raise EpisodeError(f"{service.name} started a runtime without naming it by `runtime`")
        return RemoteFiles(self, service, f"/{quote(identity, safe='')}")

    def stop(self, service: _Service, path: str) -> None:
        self._stopping.append(self._stops.submit(service.delete, path))

    def close(self) -> None:
        self._stops.shutdown()


class _Service:
    """A connection for each request: minutes may pass between two."""

    def __init__(self, config: RemoteRuntime, address: Address, headers: Mapping[str, str]) -> None:
        self._config, self._address, self._headers = config, address, headers
        self.name = address.name
        self._free: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def post(self, path: str, body: Mapping[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        """Return the answer. seconds: that it may take beyond `timeout_seconds`. Raises EpisodeError."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=_MAX_PAUSE),
            retry=retry_if_exception_type(_NotTakenError),
            reraise=True,
        )
        loop = asyncio.get_running_loop()
        if self._free is None or self._free[0] is not loop:
            self._free = loop, asyncio.Semaphore(self._config.requests_per_server)
        async with self._free[1]:
            answer: dict[str, Any] = await retrying(self._sent, path, body, seconds)
        return answer

    async def _sent(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        name, limit = self.name, self._config.timeout_seconds + seconds
        timeout = httpx.Timeout(limit, connect=min(limit, _CONNECT_SECONDS))
        content = b""
        try:
            async with (
                httpx.AsyncClient(timeout=timeout, headers=self._headers) as client,
                client.stream("POST", self._address.url + path, json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _MOST_ANSWER:
                        raise EpisodeError(f"{name} answered with more than {_MOST_ANSWER // 2**20} MiB")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _NotTakenError(f"{name} cannot be reached: {type(error).__name__}: {reason_of(error)}") from error
        except httpx.TimeoutException as error:
            raise EpisodeError(f"{name} did not answer within {limit:g} s") from error
        except httpx.RequestError as error:
            raise EpisodeError(f"{name} cannot be asked: {type(error).__name__}: {reason_of(error)}") from error
        if response.status_code in _NOT_TAKEN:
            raise _NotTakenError(f"{name} answered with status {response.status_code}: {shown(content)}")
        if response.status_code != 200:
            raise EpisodeError(f"{name} answered with status {response.status_code}: {shown(content)}")
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise EpisodeError(f"{name} did not answer with JSON: {shown(content)!r}") from error
        if not isinstance(answer, dict):
            raise EpisodeError(f"{name} answered {shown(content)!r}, expected a mapping")
        return answer

    def delete(self, path: str) -> None:
        with suppress(httpx.HTTPError):  # the service ends runtimes that nothing asks for
            httpx.delete(self._address.url + path, headers=self._headers, timeout=self._config.timeout_seconds)


class RemoteFiles(Runtime):
    def __init__(self, host: RemoteRuntimes, service: _Service, path: str) -> None:
        self._host, self._service, self._path = host, service, path
        self._stopped = False

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._service.post(f"{self._path}/write", {"files": _encoded(files)})

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        asked = {"command": command, "seconds": seconds, "variables": dict(variables or {})}
        match await self._service.post(f"{self._path}/run", asked, seconds):
            case {"output": str(output), "status": int(status), "stopped": stopped, "cut": bool(cut)}:
                if stopped in _LIMITS:
                    return Ran(output[:MOST_OUTPUT], status, stopped, cut or len(output) > MOST_OUTPUT)
        raise EpisodeError("the runtime service answered to a command without {output, status, stopped, cut}")

    async def read(self, path: str) -> bytes | None:
        match await self._service.post(f"{self._path}/read", {"path": path}):
            case {"content": None}:
                return None
            case {"content": str(content)}:
                with suppress(binascii.Error, ValueError):
                    return base64.b64decode(content, validate=True)
        raise EpisodeError("the runtime service answered to a read without base64 or null as `content`")

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._host.stop(self._service, self._path)


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}
