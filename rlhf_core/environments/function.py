"""Environments and tools of the user's Python file: one object per episode, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import FunctionEnvironment
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.environments.tools.toolset import ToolResult, Toolset
from rlhf_core.errors import EpisodeError
from rlhf_core.processes.hosting import EpisodeHost, EpisodeProcess
from rlhf_core.system.terminal import limited

_ASKED = ("messages", "max_tokens", "stop", "temperature", "top_p")
_FEEDBACK = ("messages", "reward", "done", *_ASKED[1:])


class FunctionHost(EnvironmentHost):
    @classmethod
    def of(cls, config: FunctionEnvironment, context: StageContext, tokenizer: Tokenizer) -> FunctionHost:
        return cls(config, context.user_file(config.path))

    def __init__(
        self, config: FunctionEnvironment, file: Path, *, log: IO[bytes] | None = None, folder: Path | None = None
    ) -> None:
        """Load the file. log, folder: see UserProcess.

        Raises RecipeError, StageError or RewardError if the file cannot be loaded.
        """
        self.name = f"{config.path}:{config.function}"
        self.max_turns = config.max_turns
        self.tolerated_failures = config.tolerated_failures
        self.episode_seconds = config.episode_seconds
        self.parallel_episodes = config.parallel_episodes
        self._seconds = config.timeout_seconds
        self._host = EpisodeHost(config, file, "environment", log=log, folder=folder)

    def new(self) -> ProcessEnvironment:
        return ProcessEnvironment(self._host.new(), self._seconds)

    def close(self) -> None:
        self._host.close()


class FunctionTools(Toolset):
    """Tools of the user's file."""

    @classmethod
    def of(cls, config: FunctionTool, context: StageContext) -> FunctionTools:
        return cls(config, context.user_file(config.path))

    def __init__(self, config: FunctionTool, file: Path) -> None:
        """Load the file. Raises RecipeError, StageError or RewardError if it cannot be loaded."""
        self._seconds = config.timeout_seconds
        self._host = EpisodeHost(config, file, "tool")
        self.schemas = self._host.loaded["schemas"]

    def new(self) -> ProcessTools:
        return ProcessTools(self._host.new(), self._seconds)

    def close(self) -> None:
        self._host.close()


class _Hosted:
    """Base of one episode's environment or tools, in a process that starts with `reset` and ends with `close`."""

    def __init__(self, process: EpisodeProcess, seconds: float) -> None:
        self._process, self._seconds = process, seconds

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        await self._process.begin()
        return await self._answer({"row": dict(row), "seed": seed})

    def close(self) -> None:
        self._process.close()

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        try:
            async with asyncio.timeout(limited(self._seconds)):
                await self._process.send(request)
                return await self._process.value()
        except TimeoutError as error:
            raise EpisodeError(f"it did not return within {self._seconds:g} s and was stopped") from error


class ProcessEnvironment(_Hosted, Environment):
    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        value = await super().reset(row, seed)
        return _feedback(value, "reset", _ASKED) if isinstance(value, dict) else value

    async def step(self, reply: Reply) -> Any:
        value = await self._answer({"reply": reply.text})
        if not isinstance(value, dict):
            raise EpisodeError(f"step() returned {type(value).__name__}, expected a mapping {{messages, reward, done}}")
        return _feedback(value, "step", _FEEDBACK)


def _feedback(value: Mapping[str, Any], method: str, read: Sequence[str]) -> Feedback:
    if unknown := sorted(value.keys() - set(read)):
        raise EpisodeError(f"{method}() returned {unknown[0]!r}; what is read are {', '.join(f'`{k}`' for k in read)}")
    return Feedback(**value)


class ProcessTools(_Hosted):
    async def call(self, name: str, arguments: Any) -> ToolResult:
        answer = await self._answer({"reply": {"name": name, "arguments": arguments}})
        if "wrong" in answer:
            return ToolResult(f"Error: wrong arguments: {answer['wrong']}", "wrong_arguments")
        if "raised" in answer:
            return ToolResult(f"Error: {answer['raised']}", "tool_errors")
        return ToolResult(answer["result"])
