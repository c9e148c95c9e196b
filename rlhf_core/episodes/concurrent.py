"""Episodes side by side, none of which waits for another: a reply is sampled as soon as it is asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rlhf_core.episodes.rounds import Play
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.engines import Advancing, Sampler
from rlhf_core.types import Completion

T = TypeVar("T")


def play_concurrently(episodes: Sequence[Play[T]], engines: Sampler) -> list[T]:
    """What each episode returns, in their order; the first error of an episode or an engine is raised.

    All replies of an episode are sampled by one engine, which has computed its prefix, and neighbours share an engine.
    After an error the engines may have begun what nothing waits for, and are of no further use.
    """
    each = engines.each()
    # An engine's calls block, so that it has a thread.
    with ThreadPoolExecutor(len(each)) as threads:
        return asyncio.run(_played(episodes, [EngineQueue(engine, threads) for engine in each]))


async def _played(episodes: Sequence[Play[T]], queues: Sequence[EngineQueue]) -> list[T]:
    count = len(episodes)
    playing = asyncio.gather(*(play(queues[i * len(queues) // count].ask) for i, play in enumerate(episodes)))
    serving = [asyncio.create_task(queue.serve()) for queue in queues]
    # Serving ends by an error alone. What is left of either is cancelled with the event loop.
    first: list[asyncio.Future[Any]] = [playing, *serving]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    for queue in serving:
        if queue.done():
            queue.result()
    return await playing


class EngineQueue:
    """Of one engine: what its episodes ask for, and wait for."""

    def __init__(self, engine: Advancing, threads: Executor) -> None:
        self._engine, self._threads = engine, threads
        self._numbers = itertools.count()
        self._new: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._sampled: dict[int, asyncio.Future[Completion]] = {}  # by the engine, which has begun it
        self._abandoned: list[int] = []  # that the engine has begun, and nothing waits for any more
        self._held = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def length(self) -> int:
        """Replies that were asked for and are not whole."""
        return len(self._new) + len(self._sampled)

    async def ask(self, request: Request) -> Completion:
        number = next(self._numbers)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._new[number] = request, future
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._new.pop(number, None)
            if self._sampled.pop(number, None) is not None:
                self._abandoned.append(number)
            raise

    async def hold(self) -> None:
        """Begin nothing more until `release`, and return once the engine has nothing that it has begun."""
        self._held = True
        await self._idle.wait()

    def release(self) -> None:
        self._held = False
        self._changed.set()

    async def serve(self) -> None:
        while await self._changed.wait():
            new: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
            if not self._held:
                new, self._new = self._new, {}
            self._sampled |= {number: future for number, (_, future) in new.items()}
            abandoned, self._abandoned = self._abandoned, []
            if not self._sampled and not abandoned:
                self._idle.set()
                self._changed.clear()
                continue
            self._idle.clear()
            requests = {number: request for number, (request, _) in new.items()}
            completions = await asyncio.get_running_loop().run_in_executor(
                self._threads, partial(self._engine.advance, requests, abandoned=abandoned)
            )
            for number, completion in completions.items():
                future = self._sampled.pop(number, None)  # none: it was abandoned meanwhile
                if future is not None and not future.done():
                    future.set_result(completion)
