"""A fork of a ForkServer, and the exchange of JSON lines with it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlhf_core.processes.lines import ProcessError, how_it_ended

LONGEST_LINE = 2**20  # bytes: more than any context holds, and tokenised in less than a second
_ENDING_SECONDS = 2.0  # that the server has to learn that a fork has ended


class ForkedProcess:
    """A fork from `begin` to `close`. `control` is this process's end of the server's socket."""

    longest_line = LONGEST_LINE

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lifeline: socket.socket | None = None

    async def begin(self) -> None:
        """Request the fork; an ended server counts as an ended fork."""
        parent_end, child_end = socket.socketpair()
        self._lifeline, its = socket.socketpair()
        self._lifeline.setblocking(False)
        with child_end, its:
            self._streams = await asyncio.open_connection(sock=parent_end, limit=self.longest_line)
            with suppress(OSError):
                socket.send_fds(self._control, [b"f"], [child_end.fileno(), its.fileno()])

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises ProcessError if the fork has ended."""
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()
        except ConnectionError as error:
            raise await self._ended() from error

    async def receive(self) -> Any:
        """Return the next message.

        Raises ProcessError if there is none, LimitOverrunError if it exceeds `longest_line`, ValueError if it is
        not JSON.
        """
        return json.loads(await self.line())

    async def line(self) -> bytes:
        """Return the next message as it was sent. Raises as `receive` does."""
        assert self._streams is not None
        try:
            return await self._streams[0].readuntil(b"\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._ended() from error

    async def _ended(self) -> ProcessError:
        """Return the error for an ended fork; its status is unknown if its server has ended."""
        status = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_SECONDS):
                status = await self._status()
        return ProcessError(how_it_ended(int(status)) if status else "ended")

    async def _status(self) -> bytes:
        assert self._lifeline is not None
        with suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self._lifeline, 64)
        return b""

    async def finish(self) -> None:
        """Close the sending side, and wait until the fork ends by itself."""
        if self._streams is not None:
            with suppress(OSError):  # it has ended
                self._streams[1].write_eof()
            await self._status()

    def close(self) -> None:
        """Kill the fork with its descendants. Idempotent."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
