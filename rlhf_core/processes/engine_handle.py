"""The policy, as an executor calls it from its own process over the episode's socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Sample a completion after the tokens, at the temperature of the run.

        max_tokens: none for `sampling.max_tokens`. stop: the completion ends with the token that completes one of these
        texts. Raises ValueError beyond the limits of the episode, or of the context.
        """
        request = {"token_ids": list(token_ids), "max_tokens": max_tokens, "stop": list(stop)}
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

    async def _request(self, method: str, arguments: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.create_task(self._read())
        number = next(self._numbers)
        future = self._waiting[number] = loop.create_future()
        line = json.dumps({"ask": method, "number": number, "arguments": arguments}).encode() + b"\n"
        await loop.run_in_executor(None, self._connection.sendall, line)
        answer: dict[str, Any] = await future
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer["answer"]

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            answer = await loop.run_in_executor(None, next, self._answers)
            future = self._waiting.pop(answer["number"])
            if not future.cancelled():
                future.set_result(answer)


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
