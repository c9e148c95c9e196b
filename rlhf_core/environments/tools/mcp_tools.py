"""Tools of a server of the Model Context Protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rlhf_core.config.environments.tools import McpTool
from rlhf_core.contract import StageContext
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult, Toolset
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.processes.mcp_server import McpServer, McpServers, tools_digest


class McpTools(Toolset):
    @classmethod
    def of(cls, config: McpTool, context: StageContext) -> McpTools:
        servers = McpServers(config, context.user_file)
        try:
            return cls(config, servers, context.pin(config.pin_name))
        except BaseException:
            servers.close()
            raise

    def __init__(self, config: McpTool, servers: McpServers, digest: str | None) -> None:
        """Start a server. digest: of the tools that the stage's key was computed with; none: it has none.

        Raises StageError if the server cannot be started, or has other tools.
        """
        self._config, self._servers = config, servers
        try:
            first = asyncio.run(servers.start())
        except EpisodeError as error:
            raise StageError(str(error)) from error
        if digest is not None and tools_digest(first.tools) != digest:
            raise StageError(
                f"the MCP server `{config.name}` has other tools here than where the run was planned: install the same "
                "version of it, or run again"
            )
        named = {tool.name: tool for tool in first.tools}
        if missing := next((name for name in config.only if name not in named), None):
            raise StageError(f"the MCP server `{config.name}` has no tool `{missing}`; it has {', '.join(named)}")
        self.schemas = [
            {
                "type": "function",
                "function": {
                    "name": name, "description": tool.description or "", "parameters": dict(tool.input_schema),
                },
            }
            for name, tool in named.items()
            if not config.only or name in config.only
        ]  # fmt: skip
        if not self.schemas:
            raise StageError(f"the MCP server `{config.name}` has no tools")
        self._shared: McpServer | None = first if config.shared else None
        if not config.shared:
            servers.end(first)

    def new(self) -> EpisodeTools:
        return _Calls(self)

    async def server(self) -> McpServer:
        """Return the server of an episode: its own, or the shared one, which is started again after a failure."""
        if not self._config.shared:
            return await self._servers.start()
        if self._shared is not None and self._shared.failed:
            self._servers.end(self._shared)
            self._shared = None
        if self._shared is None:
            self._shared = await self._servers.start()
        return self._shared

    def release(self, server: McpServer) -> None:
        if not self._config.shared:
            self._servers.end(server)

    def close(self) -> None:
        self._servers.close()


class _Calls:
    """The calls of one episode. A server that fails fails the episode."""

    def __init__(self, tools: McpTools) -> None:
        self._tools = tools
        self._server: McpServer | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._server = await self._tools.server()

    async def call(self, name: str, arguments: Any) -> ToolResult:
        assert self._server is not None
        if not isinstance(arguments, dict):
            return ToolResult("Error: the arguments must be a mapping", "wrong_arguments")
        called = await self._server.call(name, arguments)
        return ToolResult(called.text or "[no output]", "tool_errors" if called.is_error else None)

    def close(self) -> None:
        if self._server is not None:
            self._tools.release(self._server)
            self._server = None
