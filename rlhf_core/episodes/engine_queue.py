"""Request queue of one engine; requests start immediately."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from rlhf_core.rollout.engine import Progress, Refused, Request, RolloutEngine, Unfinished
from rlhf_core.rollout.engines import Engines
from rlhf_core.types import Completion

Heard = Callable[[Unfinished], None]


class RefusedRequestError(Exception):
    """An engine cannot sample the structure of a request. The message is the engine's."""


class EngineQueue:
    """Requests of the episodes of one engine, and their pending replies."""

    def __init__(self, engines: Engines, index: int, threads: Executor) -> None:
        self._engines, self._index, self._threads = engines, index, threads
        self._numbers = itertools.count()
        self._new: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._listeners: dict[int, Heard] = {}
        self._sampled: dict[int, asyncio.Future[Completion]] = {}  # by the engine, which has begun it
        self._abandoned: list[int] = []  # that the engine has begun, and nothing waits for any more
        self._held = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def ask(self, request: Request, heard: Heard | None = None) -> Completion:
        """Return the completion. heard: called meanwhile with what there is so far, if the request streams.

        Raises RefusedRequestError for a structure that the engine cannot sample.
        """
        number = next(self._numbers)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._new[number] = request, future
        if heard is not None:
            self._listeners[number] = heard
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._new.pop(number, None)
            if self._sampled.pop(number, None) is not None:
                self._abandoned.append(number)
            raise
        finally:
            self._listeners.pop(number, None)

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
            answers = await asyncio.get_running_loop().run_in_executor(self._threads, advance)
            for number, answer in answers.items():
                self._deliver(number, answer)

    def _deliver(self, number: int, answer: Progress) -> None:
        if isinstance(answer, Unfinished):
            if number in self._listeners:
                self._listeners[number](answer)
            return
        future = self._sampled.pop(number, None)  # none: it was abandoned meanwhile
        if future is None or future.done():
            return
        if isinstance(answer, Refused):
            future.set_exception(RefusedRequestError(answer.reason))
        else:
            future.set_result(answer)
