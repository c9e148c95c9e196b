"""Servers of the Model Context Protocol, as child processes or by HTTP, by the protocol's own client.

That client wants a task of an event loop for each server: here the loop of a thread, whatever loop calls a tool.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import rlhf_core
from rlhf_core.config.environments.tools import McpTool
from rlhf_core.errors import EpisodeError, RecipeError, one_line, reason_of
from rlhf_core.processes import with_parent
from rlhf_core.system.scratch import new_folder, remove
from rlhf_core.system.variables import header_of

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import CallToolResult, Tool

T = TypeVar("T")
_MOST_TOOLS = 1000
_CLOSING_SECONDS = 10.0  # more than the client gives a server to end, before it kills it


@dataclass(frozen=True, slots=True)
class Called:
    """The result of a call."""

    text: str
    is_error: bool


class McpServers:
    """Starts servers of one command, or sessions at one URL. `close` ends all of them."""

    def __init__(self, config: McpTool, file: Callable[[str], Path], log: TextIO | None = None) -> None:
        """file: returns the local path of a file of the recipe, for those that the server needs. log: target of the
        servers' standard error; none: that of this process.
        """
        self._config, self._log = config, log or sys.stderr
        self._folder = new_folder("mcp")
        for path in config.files:
            (copy := self._folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file(path), copy)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: set[McpServer] = set()

    async def start(self) -> McpServer:
        """Start a server. Raises EpisodeError if it does not introduce itself in time."""
        server = McpServer(self._config, self._folder, self._log, self._loop)
        self._servers.add(server)
        try:
            await asyncio.wrap_future(server.begun)
        except BaseException:
            self.end(server)
            raise
        return server

    def end(self, server: McpServer) -> None:
        """End a server, without waiting for that."""
        server.end()
        self._servers = {other for other in self._servers if not other.over.done()}

    def close(self) -> None:
        for server in self._servers:
            server.end()
        for server in self._servers:
            with suppress(TimeoutError):
                server.over.result(_CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        remove(self._folder)


class McpServer:
    """A process, or a session at a URL, that offers tools. After a call that failed it is not used again."""

    def __init__(self, config: McpTool, folder: Path, log: TextIO, loop: asyncio.AbstractEventLoop) -> None:
        self._config, self._folder, self._log, self._loop = config, folder, log, loop
        self.begun: Future[None] = Future()
        self.tools: Sequence[Tool] = ()
        self._session: ClientSession
        self._closing: asyncio.Event
        self._fault: asyncio.Future[str]
        self.failed = ""  # why it cannot be used any more
        self.over = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        """Call a tool. Raises EpisodeError if the server does not answer as the protocol has it, in time."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop))

    def end(self) -> None:
        def end() -> None:
            self._closing.set()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(end)

    async def _serve(self) -> None:
        from mcp import ClientSession

        self._closing, self._fault = asyncio.Event(), self._loop.create_future()
        config = self._config
        try:
            async with (
                self._connected() as (read, write),
                ClientSession(read, write, message_handler=self._heard) as self._session,
            ):
                await self._answered(self._introduced(), config.start_seconds, "introduce itself")
                self.begun.set_result(None)
                await self._closing.wait()
        except Exception as error:  # the client raises many types, also as groups
            self.failed = self.failed or f"its MCP server `{config.name}` has failed: {_reason(error)}"
            if not self.begun.done():
                self.begun.set_exception(EpisodeError(self.failed))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the streams of messages from and to the server."""
        import httpx2
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self._config
        if config.url is not None:
            headers = {} if config.header_variable is None else header_of(config.header_variable)
            async with (
                # No limit of its own: a call has one.
                httpx2.AsyncClient(headers=headers, follow_redirects=True, timeout=None) as client,
                streamable_http_client(config.url, http_client=client) as streams,
            ):
                yield streams
            return
        home = str(Path(rlhf_core.__file__).parents[1])
        command = ["-P", str(Path(with_parent.__file__)), home, str(os.getpid()), *config.command]
        python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        variables = {name: os.environ[name] for name in config.variables if name in os.environ}
        parameters = StdioServerParameters(
            command=sys.executable, args=command, cwd=self._folder,
            env={"PATH": python, **variables},
        )  # fmt: skip
        async with stdio_client(parameters, self._log) as streams:
            yield streams

    async def _introduced(self) -> None:
        await self._session.initialize()
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            from mcp.types import PaginatedRequestParams

            page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            tools += page.tools
            cursor = page.next_cursor
            if len(tools) > _MOST_TOOLS:
                raise EpisodeError(f"its MCP server `{self._config.name}` has more than {_MOST_TOOLS} tools")
            if not cursor:
                break
        self.tools = tools

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        if self.failed:
            raise EpisodeError(self.failed)
        return await self._answered(
            self._called(name, dict(arguments)), self._config.timeout_seconds, f"answer to a call of `{name}`"
        )

    async def _called(self, name: str, arguments: dict[str, Any]) -> Called:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = await self._session.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise
            return Called(f"Error: {error.error.message}", is_error=True)  # such as one about the arguments
        return Called(_text(result), bool(result.is_error))

    async def _answered(self, asked: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Return the answer. Raises EpisodeError for none in time, for a line that is no message, or at its end."""
        name = self._config.name
        task = asyncio.ensure_future(asked)
        waited: set[asyncio.Future[Any]] = {task, self._fault}
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            try:
                return task.result()
            except EpisodeError as error:
                self.failed = str(error)
            except Exception as error:  # of the protocol, or of an answer that does not fit the tool's schema
                self.failed = f"its MCP server `{name}` did not {what}: {_reason(error)}"
        else:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
            if self._fault.done():
                self.failed = f"its MCP server `{name}` wrote a line that is not a message: {self._fault.result()}"
            else:
                self.failed = f"its MCP server `{name}` did not {what} within {seconds:g} s"
        raise EpisodeError(self.failed)

    async def _heard(self, message: object) -> None:
        if isinstance(message, Exception) and not self._fault.done():
            self._fault.set_result(_reason(message))


def tools_digest(tools: Iterable[Tool]) -> str:
    """Return the SHA-256 of the tools' names, descriptions and schemas."""
    content = [[tool.name, tool.description, tool.input_schema] for tool in tools]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def look_up_tools(config: McpTool, root: Path) -> str:
    """Start a server once; return the digest of its tools. root: the recipe's folder.

    Raises RecipeError if it cannot be started here.
    """

    async def look() -> str:
        server = await servers.start()
        return tools_digest(server.tools)

    with TemporaryFile("w+", errors="replace") as log:
        try:
            servers = McpServers(config, lambda path: root / path, log)
        except OSError as error:
            raise RecipeError(f"{config.pin_name}: one of its `files` cannot be read ({error.strerror})") from error
        try:
            return asyncio.run(look())
        except EpisodeError as error:
            log.seek(0)
            said = [line.strip() for line in log.read().splitlines() if line.strip()]
            last = f"; the last it wrote: {one_line(said[-1])[:300]}" if said else ""
            raise RecipeError(
                f"{config.pin_name}: the tools of this server are part of the stage's key, and cannot be looked up: "
                f"{error}{last}: plan the run where the server can be started"
            ) from error
        finally:
            servers.close()


def _text(result: CallToolResult) -> str:
    parts = [block.text if block.type == "text" else f"[{block.type}, which is not shown]" for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(f"{type(error).__name__}: {reason_of(error)}")
