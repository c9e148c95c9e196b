"""Episodes in processes of their own: one process loads the user's file, and a fork of it plays each episode."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rlhf_core.config.environments import CodeEnvironment
from rlhf_core.config.tools import FunctionTool
from rlhf_core.data.user_code import CodeKind
from rlhf_core.environments.host_process import BEGIN, END, ORDER, STATUS
from rlhf_core.errors import EpisodeError
from rlhf_core.processes.lines import how_it_ended
from rlhf_core.rewards.user_process import UserFunction, UserProcess

_LONGEST_ANSWER = 2**20  # bytes: more than any context holds, and tokenised in less than a second
_OPEN_FILES = 65_536
_ENDING_SECONDS = 2.0  # that the host has to learn that a process has ended


class EpisodeHost:
    """The process that has loaded the file."""

    def __init__(
        self,
        config: CodeEnvironment | FunctionTool,
        file: Path,
        kind: CodeKind,
        *,
        log: IO[bytes] | None = None,
        folder: Path | None = None,
    ) -> None:
        """log, folder: of its process, see UserProcess.

        Raises RecipeError, StageError or RewardError if the file cannot be loaded.
        """
        self._numbers = itertools.count()
        _allow_many_files()
        self._control, theirs = socket.socketpair()
        parameters = config.parameters if isinstance(config, CodeEnvironment) else ()
        function = UserFunction(file, config.function, config.path, parameters, config.options, kind)
        program = ("rlhf_core.environments.host_process", str(theirs.fileno()), str(config.memory_gib))
        self._process = UserProcess(function, program=program, descriptors=[theirs.fileno()], log=log, folder=folder)
        with theirs:
            self._process.start()
        self.loaded = self._process.loaded  # what the process said of the file

    def new(self) -> EpisodeProcess:
        return EpisodeProcess(self._control, next(self._numbers))

    def close(self) -> None:
        self._control.close()  # which ends the host, and with it what is left of its episodes
        self._process.close(after_seconds=5.0)


class EpisodeProcess:
    """Of one episode, from `begin` to `close`. The two exchange lines of JSON."""

    def __init__(self, control: socket.socket, number: int) -> None:
        self._control, self._number = control, number
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._status = -1  # descriptor of the pipe from which can be read how the process has ended

    async def begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        with theirs, os.fdopen(status, "wb") as told:
            self._streams = await asyncio.open_connection(sock=ours, limit=_LONGEST_ANSWER)
            self._order(BEGIN, theirs.fileno(), told.fileno())

    def close(self) -> None:
        """End the process with all that it has started. Idempotent."""
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        if self._streams is None:
            return
        self._streams[1].close()
        self._streams = None
        if self._control.fileno() >= 0:  # else the host has ended, and the episode with it
            self._order(END)

    def _order(self, kind: bytes, *descriptors: int) -> None:
        order = ORDER.pack(kind, self._number)
        with suppress(BrokenPipeError):  # its host has died, and what waits for an answer learns it
            if descriptors:
                socket.send_fds(self._control, [order], descriptors)
            else:
                self._control.sendall(order)

    async def send(self, message: Mapping[str, Any]) -> None:
        """Raises EpisodeError if the process has ended."""
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()
        except ConnectionError as error:
            raise await self._ended() from error

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises EpisodeError if it is none, or the user's code has raised an error."""
        assert self._streams is not None
        try:
            message = json.loads(await self._streams[0].readuntil(b"\n"))
        except ValueError as error:
            raise _no_answer() from error
        except asyncio.LimitOverrunError as error:
            raise EpisodeError(f"it answered with more than {_LONGEST_ANSWER // 2**20} MiB") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._ended() from error
        if not isinstance(message, dict):
            raise _no_answer()
        if "error" in message:
            raise EpisodeError(f"it raised {message['error']}")
        return message

    async def _ended(self) -> EpisodeError:
        """Of a process that will answer no more. How it ended is not known where its host has ended too."""
        deadline = asyncio.get_running_loop().time() + _ENDING_SECONDS
        how = "ended"
        while asyncio.get_running_loop().time() < deadline:
            try:
                told = os.read(self._status, STATUS.size)
            except BlockingIOError:
                await asyncio.sleep(0.02)
                continue
            how = how_it_ended(*STATUS.unpack(told)) if told else how
            break
        return EpisodeError(f"before it answered, its process {how}; see the log")

    async def value(self) -> Any:
        """What the user's code returns, which is the next message."""
        message = await self.receive()
        if "value" not in message:
            raise _no_answer()
        return message["value"]


def _no_answer() -> EpisodeError:
    return EpisodeError("its process wrote something to our socket that is no answer")


def _allow_many_files() -> None:
    """An episode needs a socket here, and two descriptors in the host."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
