"""Episodes side by side, none of which waits for another: a reply is sampled as soon as it is asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from rlhf_core.episodes.rounds import Play
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.engines import Advancing, Sampler
from rlhf_core.types import Completion

T = TypeVar("T")


def play_concurrently(episodes: Sequence[Play[T]], engines: Sampler) -> list[T]:
    """What each episode returns, in their order; the first error of an episode or an engine is raised.

    All replies of an episode are sampled by one engine, which has computed its prefix, and neighbours share an engine.
    After an error the engines may have begun what nobody waits for, and are of no further use.
    """
    each = engines.each()
    # An engine's calls block, so that it has a thread.
    with ThreadPoolExecutor(len(each)) as threads:
        return asyncio.run(_played(episodes, [_Queue(engine, threads) for engine in each]))


async def _played(episodes: Sequence[Play[T]], queues: Sequence[_Queue]) -> list[T]:
    count = len(episodes)
    playing = asyncio.gather(*(play(queues[i * len(queues) // count].ask) for i, play in enumerate(episodes)))
    serving = [asyncio.create_task(queue.serve()) for queue in queues]
    # Serving ends by an error alone. What is left of either is cancelled with the event loop.
    await asyncio.wait([playing, *serving], return_when=asyncio.FIRST_COMPLETED)
    for queue in serving:
        if queue.done():
            queue.result()
    return await playing


class _Queue:
    """Of one engine: what its episodes ask for, and wait for."""

    def __init__(self, engine: Advancing, threads: Executor) -> None:
        self._engine, self._threads = engine, threads
        self._numbers = itertools.count()
        self._new: dict[int, Request] = {}
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._busy = asyncio.Event()

    async def ask(self, request: Request) -> Completion:
        number = next(self._numbers)
        self._new[number] = request
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._busy.set()
        return await future

    async def serve(self) -> None:
        while await self._busy.wait():
            requests, self._new = self._new, {}
            completions = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._engine.advance, requests
            )
            for number, completion in completions.items():
                future = self._waiting.pop(number)
                if not future.cancelled():  # its episode has ended without it
                    future.set_result(completion)
            if not self._waiting:
                self._busy.clear()
