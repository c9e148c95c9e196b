"""Programs of the user's Python file: each plays an episode in a process of its own, several at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import ProgramConfig
from rlhf_core.environments.agents.program import NO_OPTIONS, Call, CallOptions, Images, Outcome, Policy, Program
from rlhf_core.environments.base import EnvironmentHost
from rlhf_core.errors import EpisodeError
from rlhf_core.processes.hosting import EpisodeHost, EpisodeProcess
from rlhf_core.system.terminal import limited

if TYPE_CHECKING:
    from rlhf_core.types import SequenceImage


class ProgramHost(EnvironmentHost):
    def __init__(self, config: ProgramConfig, file: Path) -> None:
        """Load the file. Raises RecipeError, StageError or RewardError if it cannot be loaded."""
        self.name = f"{config.path}:{config.function}"
        self.max_turns = config.max_turns
        self.tolerated_failures = config.tolerated_failures
        self.config = config
        self.parallel_episodes = config.parallel_episodes
        self.host = EpisodeHost(config, file, "program")

    def close(self) -> None:
        self.host.close()


class ProcessProgram(Program):
    def __init__(self, programs: ProgramHost) -> None:
        self._programs = programs
        self._process = programs.host.new()

    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        seconds = self._programs.config.timeout_seconds
        try:
            async with _own_time(policy, seconds) as timed:
                await self._process.begin()
                return await self._play(self._process, row, seed, timed)
        except TimeoutError as error:
            raise EpisodeError(
                f"it did not return within {seconds:g} s, waits for replies excluded, and was stopped"
            ) from error

    def close(self) -> None:
        self._process.close()

    @abstractmethod
    async def _play(self, process: EpisodeProcess, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome: ...


@asynccontextmanager
async def _own_time(policy: Policy, seconds: float) -> AsyncIterator[_TimedPolicy]:
    """Limit a program to `seconds` of its own, without the time of replies. Raises TimeoutError."""
    async with asyncio.timeout(limited(seconds)) as limit:
        timed = _TimedPolicy(policy, limit)
        try:
            yield timed
        finally:
            timed.is_over = True


class _TimedPolicy:
    """Policy that stops the clock while a reply is pending: engines may be busy with other episodes."""

    def __init__(self, policy: Policy, limit: asyncio.Timeout) -> None:
        self._policy, self._limit = policy, limit
        self._waiting = 0
        self._left = 0.0  # seconds, while any reply is waited for
        self.is_over = False  # the program has ended

    @property
    def tokenizer(self) -> Tokenizer:
        return self._policy.tokenizer

    @property
    def max_length(self) -> int:
        return self._policy.max_length

    @property
    def max_tokens(self) -> int:
        return self._policy.max_tokens

    @property
    def temperature(self) -> float:
        return self._policy.temperature

    @property
    def images(self) -> Images | None:
        return self._policy.images

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: tuple[SequenceImage, ...] = (),
        options: CallOptions = NO_OPTIONS,
    ) -> Call:
        self._stop()
        try:
            return await self._policy.generate(
                prompt, max_tokens=max_tokens, stop=stop, messages=messages, images=images, options=options
            )
        finally:
            self._go_on()

    def _stop(self) -> None:
        self._waiting += 1
        deadline = self._limit.when()
        if self._waiting == 1 and deadline is not None and self._runs:
            self._left = deadline - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def _go_on(self) -> None:
        self._waiting -= 1
        if self._waiting == 0 and self._runs and limited(self._left) is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)

    @property
    def _runs(self) -> bool:
        return not self.is_over and not self._limit.expired()
