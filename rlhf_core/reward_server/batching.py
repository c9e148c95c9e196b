"""Batching of texts of concurrent requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Tokens = Sequence[int]


class BusyError(Exception):
    """Raised when more texts would wait than are allowed to."""


class Batcher:
    """Runs forwards of up to `tokens_per_batch` tokens one at a time, each over the texts that wait at its start.

    An idle model serves a request at once; the longer a forward takes, the larger the next batch.
    """

    def __init__(
        self, scores: Callable[[Sequence[Tokens]], list[float]], *, tokens_per_batch: int, max_waiting: int
    ) -> None:
        """scores: returns the scores of token sequences; called in a separate thread. max_waiting: number of texts."""
        self._scores = scores
        self._tokens_per_batch, self._max_waiting = tokens_per_batch, max_waiting
        self._waiting: deque[tuple[Tokens, asyncio.Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return the scores, in order. Raises BusyError, or the error of `scores` for a batch with one of them."""
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
            batch = self._next_batch()
            try:
                scores = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._scores, [tokens for tokens, _ in batch]
                )
            except Exception as error:  # of the model, to be raised for each request of the batch
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # as it is if its request was cancelled
                    future.set_result(score)

    def _next_batch(self) -> list[tuple[Tokens, asyncio.Future[float]]]:
        """Remove and return the first waiting texts, as many as fit, at least one."""
        batch = [self._waiting.popleft()]
        tokens = len(batch[0][0])
        while self._waiting and tokens + len(self._waiting[0][0]) <= self._tokens_per_batch:
            batch.append(self._waiting.popleft())
            tokens += len(batch[-1][0])
        return batch
