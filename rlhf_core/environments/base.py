"""The interface of an environment: messages in, messages and rewards out, without tokens and templates."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.environments.agents.program import Program

Message = Mapping[str, Any]  # role: user, system or tool; content: text; and further fields of the chat template


@dataclass(frozen=True, slots=True)
class Feedback:
    """An environment's response to a reply."""

    messages: Sequence[Message] = ()  # for the policy, before it replies again; read only if the episode continues
    reward: float = 0.0  # of this reply; those of an episode are summed by the reward `environment`
    done: bool = False  # the episode is over
    metrics: Mapping[str, float] = field(default_factory=dict)  # summed over the episode, logged as environment/NAME
    max_tokens: int | None = None  # of the next reply; none: `sampling.max_tokens`, which is the most
    stop: Sequence[str] = ()  # texts that end the next reply, beside those of `sampling.stop`
    temperature: float | None = None  # of the next reply; none: that of the run. A greedy run stays greedy
    top_p: float | None = None  # likewise; a run with `sampling.top_k` alone can have another than its own


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply in one turn."""

    text: str  # with or without special tokens (`rollout.skip_special_tokens`)
    marked: str  # with them, but for the one that ends it
    is_last: bool = False  # nothing can follow it: it was cut, or `max_turns` are over
    was_cut: bool = False  # at `sampling.max_tokens`


class Environment(ABC):
    """The environment of one episode, in whichever process. Any exception of its methods becomes an EpisodeError."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Start the episode of a dataset row, and return its first prompt: messages, or a Feedback with these and
        `max_tokens`, `stop`, `temperature` or `top_p`.

        seed: of its random generators.
        """
        return row["prompt"]

    @abstractmethod
    async def step(self, reply: Reply) -> Any:
        """Respond to a reply with a Feedback. One cut at `sampling.max_tokens` is passed too, and ends the episode."""

    async def finish(self) -> Any:
        """Return the reward of the episode as a whole, beside those of its replies. Called once, after the last one."""
        return 0.0

    def close(self) -> None:
        """End the episode. Idempotent."""
        return None


class EnvironmentHost(ABC):
    """Makes the environments of a stage: one per episode."""

    name: str  # in messages
    max_turns: int
    episode_seconds: float | None = None  # that the environment may take in all turns of an episode
    tools: Sequence[Mapping[str, Any]] = ()  # schemas of the functions that the policy may call
    tolerated_failures: float = 0.0  # share of the episodes that are played together
    parallel_episodes: int | None = None  # that may be played at a time; none: all
    _slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Hold one of the `parallel_episodes` slots of an event loop while an episode is played."""
        if self.parallel_episodes is None:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.parallel_episodes)
        return self._slots[1]

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentHost:
        """Return the host of the episodes of this row. Raises RecipeError if there is none for it."""
        return self

    @abstractmethod
    def new(self) -> Environment | Program: ...

    def close(self) -> None:
        """End all processes and connections that it has started."""
        return None
