"""Texts of concurrent requests in common forwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Tokens = Sequence[int]


class BusyError(Exception):
    """More texts are waiting than may wait."""


class Batcher:
    """Forwards of up to `tokens_per_batch` tokens, one after the other, each of what waits when it begins.

    A request that finds the model idle is answered at once; the longer a forward takes, the more the next one has.
    """

    def __init__(
        self, scores: Callable[[Sequence[Tokens]], list[float]], *, tokens_per_batch: int, max_waiting: int
    ) -> None:
        """scores: of sequences of tokens; called in a thread of its own. max_waiting: texts."""
        self._scores = scores
        self._tokens_per_batch, self._max_waiting = tokens_per_batch, max_waiting
        self._waiting: deque[tuple[Tokens, asyncio.Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, sequences: Sequence[Tokens]) -> list[float]:
        """Their scores, in order. Raises BusyError, or what `scores` raises for the batch that one of them was in."""
        if len(self._waiting) + len(sequences) > self._max_waiting:
            raise BusyError
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in sequences]
        self._waiting += zip(sequences, futures, strict=True)
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        while self._waiting:
            batch = self._taken()
            try:
                scores = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._scores, [tokens for tokens, _ in batch]
                )
            except Exception as error:  # of the model: whoever asked gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # its request may have been given up
                    future.set_result(score)

    def _taken(self) -> list[tuple[Tokens, asyncio.Future[float]]]:
        """The first that wait, as many as fit, at least one."""
        taken = [self._waiting.popleft()]
        tokens = len(taken[0][0])
        while self._waiting and tokens + len(self._waiting[0][0]) <= self._tokens_per_batch:
            taken.append(self._waiting.popleft())
            tokens += len(taken[-1][0])
        return taken
