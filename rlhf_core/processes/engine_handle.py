"""The policy, as an executor calls it from its own process over the episode's socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

from rlhf_core.processes.json_values import as_json


class RefusedCallError(ValueError):
    """The policy does not serve this call. `code` is that of the OpenAI API: too_many_calls, ...; or empty."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Tokens(list[int]):
    """Tokens, and the images among them. `+` keeps these; other lists made of the tokens have none."""

    def __init__(self, token_ids: Iterable[int] = (), images: Iterable[Sequence[int]] = ()) -> None:
        """images: of each its number in the episode, and the index of its first token."""
        super().__init__(token_ids)
        self.images = [(number, start) for number, start in images]

    def __add__(self, others: list[int]) -> Tokens:  # type: ignore[override]  # no list of other things
        return _joined(self, others)

    def __radd__(self, others: list[int]) -> Tokens:
        return _joined(others, self)

    def __iadd__(self, others: Iterable[int]) -> Tokens:  # type: ignore[override]
        self.images += [(number, len(self) + start) for number, start in _images_of(others)]
        self.extend(others)
        return self


def _images_of(token_ids: object) -> list[tuple[int, int]]:
    return token_ids.images if isinstance(token_ids, Tokens) else []


def _joined(first: list[int], second: list[int]) -> Tokens:
    moved = [(number, len(first) + start) for number, start in _images_of(second)]
    return Tokens([*first, *second], [*_images_of(first), *moved])


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
        """Sample a completion after the tokens, and the images that they have.

        max_tokens: none for `sampling.max_tokens`. stop: the completion ends with the token that completes one of these
        texts. temperature, top_p: none for those of the run; a greedy run stays greedy.
        Raises RefusedCallError beyond the limits of the episode, or of the context.
        """
        request = {
            "token_ids": list(token_ids), "max_tokens": max_tokens, "stop": list(stop), "temperature": temperature,
            "top_p": top_p, "images": _images_of(token_ids),
        }  # fmt: skip
        return Reply(**await self._request("generate", request))

    async def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Tokens:
        """Tokenize messages, which may show images, with the policy's chat template and generation prompt."""
        tokens: Tokens = await self._request("encode", {"messages": list(messages), "tools": tools})
        return tokens

    async def tokenize(self, text: str | Sequence[Mapping[str, Any]]) -> Tokens:
        """Tokenize a text alone, without special tokens. text: or a list of parts, as the content of a message that
        shows images.
        """
        tokens: Tokens = await self._request("tokenize", {"text": text})
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
        return _answer_of(method, self._send(method, arguments).result())

    async def _request(self, method: str, arguments: Mapping[str, Any]) -> Any:
        sent = await asyncio.get_running_loop().run_in_executor(None, self._send, method, arguments)
        return _answer_of(method, await asyncio.wrap_future(sent))

    def _send(self, method: str, arguments: Mapping[str, Any]) -> Future[Mapping[str, Any]]:
        future: Future[Mapping[str, Any]] = Future()
        with self._lock:
            if self._reading is None:
                self._reading = Thread(target=self._read, daemon=True)
                self._reading.start()
            number = next(self._numbers)
            self._waiting[number] = future
            request = {"ask": method, "number": number, "arguments": arguments}
            self._connection.sendall(json.dumps(request, default=as_json).encode() + b"\n")
        return future

    def _read(self) -> None:
        for answer in self._answers:
            future = self._waiting.pop(answer["number"])
            if future.set_running_or_notify_cancel():
                future.set_result(answer)


def _answer_of(method: str, answer: Mapping[str, Any]) -> Any:
    if "refused" in answer:
        raise RefusedCallError(answer["refused"], answer["code"])
    return Tokens(**answer["answer"]) if method in ("encode", "tokenize") else answer["answer"]


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
