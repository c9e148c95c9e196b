"""Parsing of the policy's tool calls, by the engines' parsers for the formats of model families.

It runs in a process of its own: importing vLLM's parsers takes about 5 s of processor time and changes settings of
torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.engines.rollout import ENGINES, RolloutEngineConfig
from rlhf_core.errors import StageError
from rlhf_core.processes.child_process import ChildProcess

_reader: CallReader | None = None  # in the child process


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Any  # JSON, of any type


@dataclass(frozen=True, slots=True)
class ParsedReply:
    content: str  # the text outside the calls
    calls: Sequence[ToolCall]


class CallReader(Protocol):
    """Parser of the calls of one format, in a process of its own. __init__ raises StageError if it is unusable."""

    marker: str | None  # text that every call contains; None if the format defines none

    def __init__(self, name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        """name: of the format. tools: schemas."""

    def read(self, reply: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedReply | None:
        """Return the calls in `reply` and the other text; None if malformed. tools: None: those of __init__."""


class ToolCallParser:
    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        marker: str | None = None,
        engine: str = RolloutEngineConfig.default_type,
        *,
        needs_marker: bool = True,
    ) -> None:
        """name: of a parser of `engine`, such as vLLM's `hermes`. tools: schemas. marker: text that every call
        contains; None: the parser's own. engine: a key of ENGINES. needs_marker: False: `parse` is not called.

        Raises StageError if there is no such parser, it does not fit the tokenizer, or it has no marker.
        """
        self._process = ChildProcess("the process that parses tool calls")
        try:
            default_marker = self._process.call(_begin, engine, name, tokenizer, [dict(tool) for tool in tools])
            if needs_marker and marker is None and default_marker is None:
                raise StageError(
                    f"environment.parser {name} does not say how a call begins, so malformed calls could not be "
                    "told from replies without one: set environment.call_marker to a text that every call has"
                )
        except BaseException:
            self.close()
            raise
        self.marker = marker or default_marker

    async def parse(self, reply: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedReply | None:
        """Return the calls in `reply`, text with special tokens, and the other text; None if its calls are malformed.

        tools: schemas; None: those of __init__.
        """
        parsed = await self._parsed(reply, tools)
        assert self.marker is not None
        return None if parsed is None or (not parsed.calls and self.marker in reply) else parsed

    async def read(self, reply: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """Parse `reply` as `parse` does; a malformed one is returned as content."""
        return await self._parsed(reply, tools) or ParsedReply(reply, ())

    async def _parsed(self, reply: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedReply | None:
        future = self._process.begin(_parse, reply, None if tools is None else [dict(tool) for tool in tools])
        await asyncio.wait([asyncio.wrap_future(future)])
        return self._process.result(future)

    def close(self) -> None:
        self._process.close(at_once=True)


def _begin(engine: str, name: str, tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> str | None:
    """Load the parser in the child process, and return its marker."""
    global _reader
    reader: CallReader = resolve_name(ENGINES[engine].tool_parser)(name, tokenizer, tools)
    _reader = reader
    return reader.marker


def _parse(reply: str, tools: list[dict[str, Any]] | None) -> ParsedReply | None:
    """Parse `reply` in the child process."""
    assert _reader is not None
    return _reader.read(reply, tools)
