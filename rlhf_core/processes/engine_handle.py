"""The policy, as an executor calls it from its own process over the episode's socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any


class RefusedCallError(ValueError):
    """The policy does not serve this call. `code` is that of the OpenAI API: too_many_calls, ...; or empty."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion sampled by the policy. As a segment of a returned sequence, its tokens are trained."""

    number: int  # of the call, in the order of the requests
    token_ids: list[int]
    logprobs: list[float]  # of each, at the sampling temperature
    finish_reason: str  # stop or length
    text: str  # without special tokens


class EngineHandle:
    """The `engine` of an executor. Supports concurrent calls."""

    def __init__(self, connection: socket.socket, answers: Iterator[Mapping[str, Any]]) -> None:
        self._connection, self._answers = connection, answers
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._lock = Lock()
        self._reading: Thread | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Reply:
        """Sample a completion after the tokens.

        max_tokens: none for `sampling.max_tokens`. stop: the completion ends with the token that completes one of these
        texts. temperature, top_p: none for those of the run; a greedy run stays greedy.
        Raises RefusedCallError beyond the limits of the episode, or of the context.
        """
        request = {
            "token_ids": list(token_ids), "max_tokens": max_tokens, "stop": list(stop), "temperature": temperature,
            "top_p": top_p,
        }  # fmt: skip
        return Reply(**await self._request("generate", request))

    async def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """Tokenize messages with the policy's chat template and generation prompt."""
        tokens: list[int] = await self._request("encode", {"messages": list(messages), "tools": tools})
        return tokens

    async def tokenize(self, text: str) -> list[int]:
        """Tokenize a text alone, without special tokens."""
        tokens: list[int] = await self._request("tokenize", {"text": text})
        return tokens

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, dropping special tokens."""
        text: str = await self._request("decode", {"token_ids": list(token_ids)})
        return text

    async def limits(self) -> dict[str, Any]:
        """Return `max_length` of prompt and completion together, `max_tokens` of a completion, and `temperature`."""
        limits: dict[str, Any] = await self._request("limits", {})
        return limits

    def blocking(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a request, for code that cannot await: concurrent calls wait."""
        return _answer_of(self._send(method, arguments).result())

    async def _request(self, method: str, arguments: Mapping[str, Any]) -> Any:
        sent = await asyncio.get_running_loop().run_in_executor(None, self._send, method, arguments)
        return _answer_of(await asyncio.wrap_future(sent))

    def _send(self, method: str, arguments: Mapping[str, Any]) -> Future[Mapping[str, Any]]:
        future: Future[Mapping[str, Any]] = Future()
        with self._lock:
            if self._reading is None:
                self._reading = Thread(target=self._read, daemon=True)
                self._reading.start()
            number = next(self._numbers)
            self._waiting[number] = future
            line = json.dumps({"ask": method, "number": number, "arguments": arguments}).encode() + b"\n"
            self._connection.sendall(line)
        return future

    def _read(self) -> None:
        for answer in self._answers:
            future = self._waiting.pop(answer["number"])
            if future.set_running_or_notify_cancel():
                future.set_result(answer)


def _answer_of(answer: Mapping[str, Any]) -> Any:
    if "refused" in answer:
        raise RefusedCallError(answer["refused"], answer["code"])
    return answer["answer"]


def claimed(value: Any) -> Any:
    """Convert an executor's return value, with its segments in the stage's format."""
    if not isinstance(value, Mapping) or not isinstance(value.get("sequences"), list | tuple):
        return value
    sequences = [
        [_segment(part) for part in each] if isinstance(each, list | tuple) else each for each in value["sequences"]
    ]
    return {**value, "sequences": sequences}


def _segment(part: Any) -> Any:
    if isinstance(part, Reply):
        return {"call": part.number, "token_ids": part.token_ids}
    return {"given": list(part)} if isinstance(part, list | tuple) else part
