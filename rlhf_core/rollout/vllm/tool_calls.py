"""vLLM's parsers of tool calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.errors import StageError, did_you_mean, reason_of
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCall
from rlhf_core.rollout.vllm.environment import set_vllm_environment

_MARKERS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")  # attributes of parsers


class VllmCallReader:
    """Implements rollout.tool_calls.CallReader."""

    def __init__(self, name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        set_vllm_environment()
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # or it logs a traceback for each malformed call
        registered = ToolParserManager.list_registered()
        if name not in registered:
            raise StageError(
                f"environment.parser: vLLM has no tool parser {name!r}{did_you_mean(name, registered)}; it has "
                f"{', '.join(registered)}"
            )
        self._kind: Any = ToolParserManager.get_tool_parser(name)
        self._tokenizer, self._tools = tokenizer, tools
        try:
            parser, _ = self._parser(tools)
        except Exception as error:  # parsers may raise anything if their tokens are missing
            raise StageError(
                f"environment.parser {name} does not fit the model's tokenizer: {reason_of(error)}"
            ) from error
        markers = (getattr(parser, marker, None) for marker in _MARKERS)
        self.marker: str | None = next((marker for marker in markers if isinstance(marker, str)), None)

    def _parser(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools) or None})
        return self._kind(self._tokenizer, request.tools), request

    def read(self, reply: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedReply | None:
        try:
            parser, request = self._parser(self._tools if tools is None else tools)
            extracted = parser.extract_tool_calls(reply, request)
            calls = [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in extracted.tool_calls]
            return ParsedReply(extracted.content or "" if calls else reply, calls)
        except Exception:  # parsers may raise anything for a malformed reply
            return None
