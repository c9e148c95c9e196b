"""Follows a job's log and splits it into messages (rlhf_core/tracking/protocol.py) and plain lines."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import aiohttp

from rlhf_core.tracking.protocol import JobError, Progress, parse

_RECONNECT_SECONDS = 1.0
_SETTLE_SECONDS = 0.3
# Ray writes it into the log before it starts the command, but flushes it afterwards: it may come after the job's lines.
LINE_OF_RAY = "Running entrypoint for job "


class LogSource(Protocol):
    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield the log in pieces, from its start until the job has ended."""


class JobLog:
    """Reads the log in a background thread and delivers its lines in the caller's thread.

    Two threads, because Prefect's calls behave differently inside an event loop.
    """

    def __init__(
        self, source: LogSource, job_id: str, on_line: Callable[[str], None], on_progress: Callable[[Progress], None]
    ):
        self.error: JobError | None = None  # the newest message of that kind
        self.last_line = ""  # of the job, not of Ray
        self._on_line = on_line
        self._on_progress = on_progress
        self._pieces: queue.Queue[str] = queue.Queue()
        self._unfinished = ""  # a line whose newline has not arrived
        self._seen = 0  # characters delivered
        self._follower = _Follower(source, job_id, self._pieces)

    def deliver(self, *, wait_seconds: float) -> None:
        """Deliver the lines that have arrived; wait at most `wait_seconds` for the first piece."""
        try:
            self._feed(self._pieces.get(timeout=wait_seconds))
            while True:
                self._feed(self._pieces.get_nowait())
        except queue.Empty:
            return

    def finish(self, whole_log: Callable[[], str], *, settled: bool) -> str:
        """Deliver the rest from the whole log, when the job has ended; return that.

        The reader is not waited for: Ray polls for new lines once a second, and for the job's end a second later.
        settled: the log has its last line; else it is read until it has stopped growing.
        """
        self._follower.stop()
        self.deliver(wait_seconds=0.0)
        log = whole_log() if settled else _settled(whole_log)
        self._feed(log[self._seen :])
        if self._unfinished:
            self._feed("\n")
        return log

    def close(self) -> None:
        self._follower.stop()

    def _feed(self, piece: str) -> None:
        self._seen += len(piece)
        *lines, self._unfinished = (self._unfinished + piece).split("\n")
        for line in lines:
            self._take(line)

    def _take(self, line: str) -> None:
        message = parse(line)
        if isinstance(message, Progress):
            self._on_progress(message)
            return
        if isinstance(message, JobError):
            self.error = message
        elif line.strip() and not line.startswith(LINE_OF_RAY):
            self.last_line = line.strip()
        self._on_line(line)


def _settled(whole_log: Callable[[], str]) -> str:
    """Return the log once it has stopped growing: on a busy node its last lines can arrive after the job has ended."""
    log = whole_log()
    while True:
        time.sleep(_SETTLE_SECONDS)
        again = whole_log()
        if again == log:
            return log
        log = again


class _Follower(threading.Thread):
    """Reads the log's web socket. After a lost connection it reads from the start and skips the delivered part."""

    def __init__(self, source: LogSource, job_id: str, pieces: queue.Queue[str]):
        super().__init__(name=f"log of {job_id}", daemon=True)
        self._source = source
        self._job_id = job_id
        self._pieces = pieces
        self._read = 0  # characters put into the queue
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._until_stopped())

    def stop(self) -> None:
        self._stopped.set()

    async def _until_stopped(self) -> None:
        reading = asyncio.create_task(self._read_all())
        while not reading.done() and not self._stopped.is_set():
            await asyncio.wait({reading}, timeout=0.2)
        reading.cancel()

    async def _read_all(self) -> None:
        while not self._stopped.is_set():
            try:
                await self._read_once()
                return
            except (OSError, RuntimeError, aiohttp.ClientError):
                # Retry: a cluster that is gone for good is reported by the caller, which polls the job's status.
                await asyncio.sleep(_RECONNECT_SECONDS)

    async def _read_once(self) -> None:
        position = 0
        async for piece in self._source.tail_job_logs(self._job_id):
            if self._stopped.is_set():
                return
            start = max(0, self._read - position)
            position += len(piece)
            if start < len(piece):
                self._pieces.put(piece[start:])
                self._read = position
