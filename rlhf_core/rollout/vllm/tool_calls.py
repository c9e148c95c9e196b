"""The policy's calls of tools, read by vLLM's parsers for the formats of model families.

In a process of its own: importing them takes about 5 s of processor time and changes settings of torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.errors import StageError, did_you_mean, reason_of
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.vllm.environment import set_vllm_environment

_MARKERS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")  # attributes of parsers

_reader: Any = None  # of the child process


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Any  # JSON, of any type


@dataclass(frozen=True, slots=True)
class ParsedReply:
    content: str  # what is written beside the calls
    calls: Sequence[ToolCall]


class ToolCallParser:
    def __init__(
        self, name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], marker: str | None = None
    ) -> None:
        """name: vLLM's, such as `hermes`. tools: schemas. marker: text in every call; none: the parser's own.

        Raises StageError if there is no such parser, it cannot read what this tokenizer writes, or it has no marker.
        """
        self._process = ChildProcess("the process that parses tool calls")
        try:
            own = self._process.call(_begin, name, tokenizer, [dict(tool) for tool in tools])
            if marker is None and own is None:
                raise StageError(
                    f"environment.parser {name} does not say how a call begins, so that malformed calls could not be "
                    "told from replies without one: set environment.call_marker to a text that every call has"
                )
        except BaseException:
            self.close()
            raise
        self._marker = marker or str(own)

    async def parse(self, reply: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedReply | None:
        """The calls in `reply`, text with special tokens, and what is beside them; None if its calls cannot be read.

        tools: schemas, if they are other ones than the parser was made with.
        """
        parsed = await self._parsed(reply, tools)
        return None if parsed is None or (not parsed.calls and self._marker in reply) else parsed

    async def read(self, reply: str) -> ParsedReply:
        """As `parse`. What cannot be read is content."""
        return await self._parsed(reply, None) or ParsedReply(reply, ())

    async def _parsed(self, reply: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedReply | None:
        future = self._process.begin(_parse, reply, None if tools is None else [dict(tool) for tool in tools])
        await asyncio.wait([asyncio.wrap_future(future)])
        return self._process.result(future)

    def close(self) -> None:
        self._process.close(at_once=True)


def _begin(name: str, tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> str | None:
    """In the child: the marker of the parser, which is loaded."""
    global _reader
    set_vllm_environment()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # else a traceback for each malformed call
    known = ToolParserManager.list_registered()
    if name not in known:
        raise StageError(
            f"environment.parser: vLLM has no tool parser {name!r}{did_you_mean(name, known)}; it has "
            f"{', '.join(known)}"
        )
    kind: Any = ToolParserManager.get_tool_parser(name)

    def new(tools: list[dict[str, Any]]) -> tuple[Any, Any]:
        request = ChatCompletionRequest.model_validate({"messages": [], "tools": tools or None})
        return kind(tokenizer, request.tools), request

    try:
        parser, _ = new(tools)
    except Exception as error:  # a parser that misses its tokens raises what it likes
        raise StageError(f"environment.parser {name} does not fit the model's tokenizer: {reason_of(error)}") from error

    def read(reply: str, others: list[dict[str, Any]] | None) -> Any:
        parser, request = new(tools if others is None else others)
        return parser.extract_tool_calls(reply, request)

    _reader = read
    return next((marker for each in _MARKERS if isinstance(marker := getattr(parser, each, None), str)), None)


def _parse(reply: str, tools: list[dict[str, Any]] | None) -> ParsedReply | None:
    """In the child."""
    try:
        found = _reader(reply, tools)
        calls = [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        return ParsedReply(found.content or "" if calls else reply, calls)
    except Exception:  # of a parser on a text that it does not expect: the reply is malformed
        return None
