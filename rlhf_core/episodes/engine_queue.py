"""Request queue of one engine; requests start immediately."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Executor
from functools import partial

from rlhf_core.rollout.engine import Request, RolloutEngine
from rlhf_core.rollout.engines import Engines
from rlhf_core.types import Completion


class EngineQueue:
    """Requests of the episodes of one engine, and their pending replies."""

    def __init__(self, engines: Engines, index: int, threads: Executor) -> None:
        self._engines, self._index, self._threads = engines, index, threads
        self._numbers = itertools.count()
        self._new: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._sampled: dict[int, asyncio.Future[Completion]] = {}  # by the engine, which has begun it
        self._abandoned: list[int] = []  # that the engine has begun, and nothing waits for any more
        self._held = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

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
        """Start no request until `release`; return once the running ones have ended."""
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
            advance = partial(self._engines.call_on, self._index, RolloutEngine.advance, requests, abandoned=abandoned)
            completions = await asyncio.get_running_loop().run_in_executor(self._threads, advance)
            for number, completion in completions.items():
                future = self._sampled.pop(number, None)  # none: it was abandoned meanwhile
                if future is not None and not future.done():
                    future.set_result(completion)
