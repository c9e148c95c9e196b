"""Concurrent episodes in rounds: the engines are called once every unfinished episode waits for a reply.

The last bits of an engine's results depend on the rest of its batch. In rounds that is a function of the episodes
alone, not of the speed of their environments, so that the same episodes get the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf_core.rollout.engine import Request, RolloutEngine
from rlhf_core.rollout.engines import Engines
from rlhf_core.types import Completion

T = TypeVar("T")
Ask = Callable[..., Awaitable[Completion]]  # delivers an episode's replies; called as EngineQueue.ask, in rounds alone
# without a listener
Play = Callable[[Ask], Coroutine[Any, Any, T]]  # an episode, from its start to its end


def play_in_rounds(episodes: Sequence[Play[T]], engines: Engines) -> list[T]:
    """Play the episodes; return their results, in order.

    Of several errors in one round, that of the first one is raised.
    """
    with asyncio.Runner() as runner:
        rounds = _Rounds(episodes)
        # The engines are called outside of the event loop, which would hold a Ctrl-C back until they have answered.
        begun = False
        while requests := runner.run(rounds.requests()):
            rounds.answer(engines.share(RolloutEngine.generate, requests, keep_prefixes=begun))
            begun = True
        if begun:
            engines.call(RolloutEngine.forget)
        return rounds.results()


class _Rounds(Generic[T]):
    def __init__(self, episodes: Sequence[Play[T]]) -> None:
        self._episodes = episodes
        self._tasks: list[asyncio.Task[T]] = []
        self._waiting: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}  # by episode
        self._busy = len(episodes)  # that neither wait nor are over
        self._all_rest = asyncio.Event()

    async def requests(self) -> list[Request]:
        """Return the requests of all unfinished episodes, in order, once all of them wait; empty at the end."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(play(partial(self._ask, i))) for i, play in enumerate(self._episodes)]
            for task in self._tasks:
                task.add_done_callback(self._rests)
        if self._busy:
            await self._all_rest.wait()
        failures = [error for task in self._tasks if task.done() and (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        return [self._waiting[index][0] for index in sorted(self._waiting)]

    def answer(self, completions: Sequence[Completion]) -> None:
        """Deliver the completions of the requests, in order."""
        futures = [self._waiting[index][1] for index in sorted(self._waiting)]
        self._waiting.clear()
        self._all_rest.clear()
        self._busy = len(futures)
        for future, completion in zip(futures, completions, strict=True):
            future.set_result(completion)

    def results(self) -> list[T]:
        return [task.result() for task in self._tasks]

    async def _ask(self, index: int, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[index] = request, future
        self._rests()
        return await future

    def _rests(self, _: object = None) -> None:
        self._busy -= 1
        if self._busy == 0:
            self._all_rest.set()
