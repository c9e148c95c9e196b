"""Environments of the user's Python file: a process loads it, and a fork of that process plays each episode."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.config.environments import FunctionEnvironment
from rlhf_core.config.tools import FunctionTool
from rlhf_core.contract import StageContext
from rlhf_core.data.chat import Tokenizer
from rlhf_core.data.user_code import CodeKind
from rlhf_core.environments.base import Environments, Feedback, Reply
from rlhf_core.environments.host_process import BEGIN, END, ORDER
from rlhf_core.environments.toolset import ToolResult, Toolset
from rlhf_core.errors import EpisodeError
from rlhf_core.rewards.user_process import UserFunction, UserProcess

_LONGEST_ANSWER = 2**20  # bytes: more than any context holds, and tokenised in less than a second
_OPEN_FILES = 65_536
_FEEDBACK = {"messages", "reward", "done"}


class FunctionEnvironments(Environments):
    @classmethod
    def of(cls, config: FunctionEnvironment, context: StageContext, tokenizer: Tokenizer) -> FunctionEnvironments:
        return cls(config, context.user_file(config.path))

    def __init__(self, config: FunctionEnvironment, file: Path) -> None:
        """Raises RecipeError, StageError or RewardError if the file cannot be loaded."""
        self.name = f"{config.path}:{config.function}"
        self.max_turns = config.max_turns
        self.tolerated_failures = config.tolerated_failures
        self._host = _Host(config, file, "environment")

    def new(self) -> HostedEnvironment:
        return HostedEnvironment(self._host)

    def close(self) -> None:
        self._host.close()


class FunctionTools(Toolset):
    """Tools of the user's file."""

    @classmethod
    def of(cls, config: FunctionTool, context: StageContext) -> FunctionTools:
        return cls(config, context.user_file(config.path))

    def __init__(self, config: FunctionTool, file: Path) -> None:
        """Raises RecipeError, StageError or RewardError if the file cannot be loaded."""
        self._host = _Host(config, file, "tool")
        self.schemas = self._host.loaded["schemas"]

    def new(self) -> HostedTools:
        return HostedTools(self._host)

    def close(self) -> None:
        self._host.close()


class _Host:
    """The process that has loaded the file."""

    def __init__(self, config: FunctionEnvironment | FunctionTool, file: Path, kind: CodeKind) -> None:
        self.seconds = config.timeout_seconds
        self.numbers = itertools.count()  # of episodes
        _allow_many_files()
        self.control, theirs = socket.socketpair()
        function = UserFunction(file, config.function, config.path, (), config.options, kind)
        program = ("rlhf_core.environments.host_process", str(theirs.fileno()), str(config.memory_gib))
        self._process = UserProcess(function, program=program, descriptors=[theirs.fileno()])
        with theirs:
            self._process.start()
        self.loaded = self._process.loaded

    def close(self) -> None:
        self.control.close()  # which ends the host, and with it what is left of its episodes
        self._process.close(after_seconds=5.0)


class _Hosted:
    """Of one episode, in a process that begins with `reset` and ends with `close`."""

    def __init__(self, host: _Host) -> None:
        self._control, self._number, self._seconds = host.control, next(host.numbers), host.seconds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            self._streams = await asyncio.open_connection(sock=ours, limit=_LONGEST_ANSWER)
            self._order(BEGIN, theirs)
        return await self._answer({"row": dict(row), "seed": seed})

    def close(self) -> None:
        if self._streams is None:
            return
        self._streams[1].close()
        self._streams = None
        if self._control.fileno() >= 0:  # else the host has ended, and the episode with it
            self._order(END)

    def _order(self, kind: bytes, *sockets: socket.socket) -> None:
        order = ORDER.pack(kind, self._number)
        with suppress(BrokenPipeError):  # its host has died, and what waits for an answer learns it
            if sockets:
                socket.send_fds(self._control, [order], [each.fileno() for each in sockets])
            else:
                self._control.sendall(order)

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        assert self._streams is not None
        reader, writer = self._streams
        try:
            async with asyncio.timeout(self._seconds):
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                answer = json.loads(await reader.readuntil(b"\n"))
        except ValueError as error:
            raise EpisodeError("its process wrote something to our socket that is no answer") from error
        except TimeoutError as error:
            raise EpisodeError(f"it did not return within {self._seconds:g} s and was stopped") from error
        except asyncio.LimitOverrunError as error:
            raise EpisodeError(f"it answered with more than {_LONGEST_ANSWER // 2**20} MiB") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EpisodeError("its process ended before it answered; see the log") from error
        if "error" in answer:
            raise EpisodeError(f"it raised:\n{answer['error']}")
        return answer["value"]


class HostedEnvironment(_Hosted):
    async def step(self, reply: Reply) -> Any:
        value = await self._answer({"reply": reply.text})
        if not isinstance(value, dict):
            raise EpisodeError(f"step() returned {type(value).__name__}, expected a mapping {{messages, reward, done}}")
        if unknown := sorted(value.keys() - _FEEDBACK):
            raise EpisodeError(f"step() returned {unknown[0]!r}; what is read are `messages`, `reward` and `done`")
        return Feedback(**value)


class HostedTools(_Hosted):
    async def call(self, name: str, arguments: Any) -> ToolResult:
        answer = await self._answer({"reply": {"name": name, "arguments": arguments}})
        if "wrong" in answer:
            return ToolResult(f"Error: wrong arguments: {answer['wrong']}", "wrong_arguments")
        if "raised" in answer:
            return ToolResult(f"Error: {answer['raised']}", "tool_errors")
        return ToolResult(answer["result"])


def _allow_many_files() -> None:
    """An episode needs a socket here, and two descriptors in the host."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
