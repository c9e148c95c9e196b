"""Episodes in a thread of their own, while this thread may train."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from rlhf_core.episodes.engine_queue import EngineQueue
from rlhf_core.episodes.rounds import Ask, Play
from rlhf_core.errors import ActorDiedError
from rlhf_core.rollout.engines import Engines

T = TypeVar("T")


class Stream:
    """An event loop over all engines. Ends with its context.

    The engines may load weights meanwhile. After an engine has failed, calls raise its error until `replace_dead`.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._stack = ExitStack()
        self._queues: list[EngineQueue] = []
        self._turns: Iterator[EngineQueue] = iter(())
        self._threads: ThreadPoolExecutor
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._error: asyncio.Future[None]  # never done, but by the first error

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._loop = stack.enter_context(asyncio.Runner()).get_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="episodes")
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the event loop, and wait for its result in this thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def play(self, episodes: Sequence[Play[T]]) -> list[T]:
        """Play the episodes; return their results, in order. The first error of an episode or an engine is raised.

        All replies of an episode are sampled by one engine, which has cached its prefix; neighbours share an engine.
        """

        async def all_of_them() -> list[T]:
            shares = [self._queues[i * len(self._queues) // len(episodes)].ask for i in range(len(episodes))]
            return await self.unless_it_fails(
                asyncio.gather(*(play(ask) for play, ask in zip(episodes, shares, strict=True)))
            )

        return self.call(all_of_them())

    def asker(self) -> Ask:
        """Return the engine of an episode: round-robin, since episodes that start together have no queue length yet."""
        return next(self._turns).ask

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, from within the event loop; its error ends the stream."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def unless_it_fails(self, result: Awaitable[T]) -> T:
        """Return `result`, or raise the error of an engine or of `begin`'s work that fails before."""
        future = asyncio.ensure_future(result)
        either: list[asyncio.Future[Any]] = [future, self._error]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._error.done():
            future.cancel()
            self._error.result()
        return await future

    def hold(self) -> None:
        """Start no reply until `release`; return once the running ones are complete."""

        async def hold() -> None:
            await self.unless_it_fails(asyncio.gather(*(queue.hold() for queue in self._queues)))

        self.call(hold())

    def release(self) -> None:
        async def release() -> None:
            for queue in self._queues:
                queue.release()

        self.call(release())

    def replace_dead(self) -> list[str]:
        """Cancel all episodes and all that was begun, and restart the engines that have died.

        See Engines.replace_dead. Raises the stream's error if it is not the death of an engine.
        """
        failed = self._error.exception() if self._error.done() else None
        if failed is not None and not isinstance(failed, ActorDiedError):
            raise failed
        self._stop()
        names = self._engines.replace_dead()
        self._start()
        return names

    def _start(self) -> None:
        self._threads = ThreadPoolExecutor(self._engines.size)
        self.call(self._begin())

    def _stop(self) -> None:
        self.call(self._end())
        self._threads.shutdown()  # once the last call of each engine has returned

    async def _begin(self) -> None:
        self._queues = [EngineQueue(self._engines, index, self._threads) for index in range(self._engines.size)]
        self._turns = itertools.cycle(self._queues)
        self._error = asyncio.get_running_loop().create_future()
        for queue in self._queues:
            self.begin(queue.serve())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._error.done():
            self._error.set_exception(error)

    async def _end(self) -> None:
        self._error.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
