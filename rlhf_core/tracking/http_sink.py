"""Trackers at an HTTP server, which get lines from a thread: a server that is away neither slows nor ends a stage."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import httpx

from rlhf_core.config.texts import names_a_host
from rlhf_core.errors import StageError, reason_of
from rlhf_core.system.stopping import STOPS

_REQUEST_SECONDS = 10.0
_LONGEST_PAUSE = 10.0  # seconds between two attempts
_CLOSE_SECONDS = 30.0  # that the end of a stage waits for lines that are not sent yet
_STOP_SECONDS = 2.0  # of one that was stopped, and is killed soon

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1
    step: int
    unix_time: float
    metrics: Mapping[str, float | str]  # "NaN" for what is not finite, since JSON has no number for it


class RefusedError(Exception):
    """The server does not accept these metrics, and would not if asked again."""


class HttpSink(ABC):
    """Sends lines in order, each once.

    Requests are retried until they succeed, or until 30 seconds after the last line. Lines that have not arrived
    by then are in metrics.jsonl alone.

    A request of `start`, `send` and `end` that may succeed later raises httpx.TransportError. Anything else ends the
    sending, with one sentence in the job's log.
    """

    label: ClassVar[str]  # the server's name, in messages
    variable: ClassVar[str]  # of the environment: the server's URL

    def __init__(self, base_url: str, **client: Any):
        """client: further arguments of httpx.Client."""
        self.client = httpx.Client(base_url=base_url, timeout=_REQUEST_SECONDS, **client)
        self._lines: queue.Queue[Line | str] = queue.Queue()
        self._number = 0
        self._given_up = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._send_all, name=self.label, daemon=True)
        self._thread.start()

    @classmethod
    def url(cls, tracker: str) -> str:
        """Return the server's URL. Raises StageError that names the recipe's `tracker` without one."""
        url = os.environ.get(cls.variable, "").rstrip("/")
        if not url.startswith(("http://", "https://")) or not names_a_host(url):
            raise StageError(
                f"the tracker `{tracker}` needs a server: set {cls.variable} to its http(s) URL where the flow runs, "
                "or remove it from `tracking.others`"
            )
        return url

    @abstractmethod
    def start(self) -> int:
        """Find this computation's run or start it, and return how many of its lines have arrived."""

    @abstractmethod
    def send(self, line: Line) -> None: ...

    @abstractmethod
    def end(self, status: str) -> None:
        """status: FINISHED, FAILED or KILLED."""

    def content(self, answer: httpx.Response) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises TransportError where asking again may help, else RefusedError."""
        if answer.status_code == 429 or answer.status_code >= 500:
            raise httpx.TransportError(f"status code {answer.status_code}")
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.status_code == 200 and isinstance(content, dict):
            return content
        reason = None
        if isinstance(content, dict):
            reason = content.get("message") or content.get("error")
        raise RefusedError(
            f"status code {answer.status_code}: {reason or f'is {self.variable} the URL of its server?'}"
        )

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._number += 1
        values = {name: value if math.isfinite(value) else "NaN" for name, value in metrics.items()}
        self._lines.put(Line(self._number, step, unix_time, values))

    def close(self) -> None:
        stopped = STOPS.requested is not None
        self._lines.put("KILLED" if stopped else "FAILED" if sys.exception() else "FINISHED")
        self._thread.join(timeout=_STOP_SECONDS if stopped else _CLOSE_SECONDS)
        if self._thread.is_alive():
            self._given_up.set()
            print(f"{self.label}: the last lines have not arrived; they are in metrics.jsonl", flush=True)
        else:
            self.client.close()

    def _send_all(self) -> None:
        arrived: int | None = None
        try:
            while not isinstance(line := self._lines.get(), str):
                if arrived is None:
                    arrived = self._until_answered(self.start)
                if line.number > arrived:
                    self._until_answered(partial(self.send, line))
            if arrived is not None:
                self._until_answered(partial(self.end, line))
        except (RefusedError, LookupError, httpx.HTTPError) as refusal:
            if not self._given_up.is_set():
                print(f"{self.label} gets no more of this job's metrics: {reason_of(refusal)}", flush=True)

    def _until_answered(self, request: Callable[[], T]) -> T:
        pause = 0.5
        while not self._given_up.is_set():
            try:
                return request()
            except httpx.TransportError as error:
                if not self._complained:
                    self._complained = True
                    print(
                        f"{self.label} cannot be reached ({reason_of(error)}); it is asked again and again", flush=True
                    )
            self._given_up.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RefusedError("the stage has ended")
