"""A job's log, line by line: what the protocol of rlhf_core/stages/runner.py says, and what is plain text."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import aiohttp

PROGRESS_PREFIX = "@progress "
ERROR_PREFIX = "@error "
_RECONNECT_SECONDS = 1.0
_SETTLE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is; `total` is 0 and `seconds_left` is None while nobody can say."""

    step: int
    total: int
    phase: str
    figures: Mapping[str, float]
    seconds_left: float | None

    @property
    def percent(self) -> float:
        return min(100.0, 100.0 * self.step / self.total) if self.total > 0 else 0.0

    def __str__(self) -> str:
        counted = f"step {self.step} of {self.total}" if self.total > 0 else f"{self.step or ''}"
        parts = [counted, self.phase]
        parts += [f"{name} {value:.4g}" for name, value in self.figures.items()]
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return " · ".join(part for part in parts if part)


class LogSource(Protocol):
    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Pieces of the log from its start, until the job has ended."""


class JobLog:
    """Follows the log in a thread of its own; lines are delivered in the thread that asks.

    The two are apart because Prefect's calls behave differently inside an event loop.
    """

    def __init__(
        self, source: LogSource, job_id: str, on_line: Callable[[str], None], on_progress: Callable[[Progress], None]
    ):
        self.error: str | None = None  # of the last @error line
        self.last_line = ""
        self._on_line = on_line
        self._on_progress = on_progress
        self._pieces: queue.Queue[str] = queue.Queue()
        self._unfinished = ""  # a line whose newline has not come yet
        self._seen = 0  # characters delivered
        self._follower = _Follower(source, job_id, self._pieces)

    def deliver(self, *, wait_seconds: float) -> None:
        """Delivers what has come, waiting for something at most so long."""
        try:
            self._feed(self._pieces.get(timeout=wait_seconds))
            while True:
                self._feed(self._pieces.get_nowait())
        except queue.Empty:
            return

    def finish(self, wait_seconds: float, whole_log: Callable[[], str]) -> None:
        """To be called when the job has ended: delivers the rest, from the whole log where following fell behind."""
        self._follower.join(wait_seconds)
        self._follower.stop()
        self.deliver(wait_seconds=0.0)
        self._feed(_settled(whole_log)[self._seen :])
        if self._unfinished:
            self._feed("\n")

    def close(self) -> None:
        self._follower.stop()

    def _feed(self, piece: str) -> None:
        self._seen += len(piece)
        *lines, self._unfinished = (self._unfinished + piece).split("\n")
        for line in lines:
            self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith(PROGRESS_PREFIX):
            progress = parse_progress(line)
            if progress is not None:
                self._on_progress(progress)
                return
        elif line.startswith(ERROR_PREFIX):
            self.error = parse_error(line)
        elif line.strip():
            self.last_line = line.strip()
        self._on_line(line)


def _settled(whole_log: Callable[[], str]) -> str:
    """The log once it has stopped growing: on a busy node its end has been seen to come after the job's."""
    log = whole_log()
    while True:
        time.sleep(_SETTLE_SECONDS)
        again = whole_log()
        if again == log:
            return log
        log = again


def parse_progress(line: str) -> Progress | None:
    """None if the line is not what the runner prints: user code may print anything, that is no reason to fail."""
    try:
        data = json.loads(line.removeprefix(PROGRESS_PREFIX))
        left = data.get("seconds_left")
        return Progress(
            step=int(data["step"]),
            total=int(data["total"]),
            phase=str(data.get("phase", "")),
            figures={str(name): float(value) for name, value in data.get("figures", {}).items()},
            seconds_left=None if left is None else float(left),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def parse_error(line: str) -> str:
    text = line.removeprefix(ERROR_PREFIX)
    try:
        data = json.loads(text)
        return f"{data['type']}: {data['message']}"
    except (ValueError, KeyError, TypeError):
        return text


class _Follower(threading.Thread):
    """Reads the log's web socket, again from the start after a blip, passing over what was read before."""

    def __init__(self, source: LogSource, job_id: str, pieces: queue.Queue[str]):
        super().__init__(name=f"log of {job_id}", daemon=True)
        self._source = source
        self._job_id = job_id
        self._pieces = pieces
        self._read = 0  # characters handed over
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
                # Whether the cluster is lost is for the one who asks for the status to say; here it is tried again.
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
