"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Literal

from aiohttp import web
from pydantic import Field

from rlhf_core.environments.agents.api.anthropic_messages import chat_messages, chat_tools, system_message
from rlhf_core.environments.agents.api.chat_messages import normalised
from rlhf_core.environments.agents.api.conversations import Conversations
from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.api.reading import ApiRequest, Part, read_request
from rlhf_core.environments.agents.api.replies import Answer, Begun, Delta, Ended, answers_to, streamed, usage
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.api.sse import event, stream
from rlhf_core.environments.agents.api.wanted import Wanted, names_to_call

_ERRORS: Mapping[int, str] = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
}  # fmt: skip


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False  # if it must call, it calls once


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    effort: Any = None  # without effect
    format: OutputFormat | None = None


class CountRequest(ApiRequest):
    ignored: ClassVar[frozenset[str]] = frozenset({
        "metadata", "service_tier", "cache_control", "thinking", "context_management",
    })  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"top_k": (0, -1)}

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig = OutputConfig()

    def wanted(self, session: Session) -> Wanted:
        tools, choice = chat_tools(self.tools), self.tool_choice
        named = choice.name if choice.type == "tool" else None
        return Wanted(
            messages=normalised([*system_message(self.system), *chat_messages(self.messages)], session.policy.images),
            tools=[] if choice.type == "none" else tools,
            must_call=names_to_call(tools, "required" if choice.type in ("any", "tool") else "auto", named),
            parallel_calls=not choice.disable_parallel_tool_use,
            schema=None if self.output_config.format is None else self.output_config.format.schema_,
        )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field(default=[], max_length=16)
    stream: bool = False

    def wanted(self, session: Session) -> Wanted:
        wanted = super().wanted(session)
        most = min(self.max_tokens, session.policy.max_tokens)  # it must be given, and clients know no limit of a run
        return replace(
            wanted,
            max_tokens=most,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def anthropic_error(error: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


async def answer_messages(session: Session, request: web.Request) -> web.StreamResponse:
    asked = read_request(await request.read(), MessagesRequest)
    if asked.stream:
        return await stream(request, _events(session, asked), _failed)
    (answer,) = await answers_to(session, asked.wanted(session))
    prompt, sampled = usage([answer])
    message = {**_head(session, asked.model, prompt), "content": _blocks(answer), **_end(answer)}
    message["usage"]["output_tokens"] = sampled
    return web.json_response(message)


async def answer_count(session: Session, request: web.Request) -> web.StreamResponse:
    wanted = read_request(await request.read(), CountRequest).wanted(session)
    prompt = Conversations(session.policy.tokenizer, session.policy.images).ask(wanted.messages, wanted.tools)
    return web.json_response({"input_tokens": len(prompt.token_ids)})


def _failed(error: RequestError) -> bytes:
    return event(anthropic_error(error), "error")


async def _events(session: Session, asked: MessagesRequest) -> AsyncGenerator[bytes, None]:
    def named(name: str, /, **data: Any) -> bytes:
        return event({"type": name, **data}, name)

    text_is_open = False
    async with aclosing(streamed(session, asked.wanted(session))) as pieces:
        async for piece in pieces:
            match piece:
                case Begun(prompt_tokens):
                    head = {**_head(session, asked.model, prompt_tokens), "content": []}
                    yield named("message_start", message={**head, "stop_reason": None, "stop_sequence": None})
                case Delta(_, text) if text:
                    if not text_is_open:
                        text_is_open = True
                        yield named("content_block_start", index=0, content_block={"type": "text", "text": ""})
                    yield named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
                case Ended(_, answer):
                    if text_is_open:
                        yield named("content_block_stop", index=0)
                    for index, call in enumerate(answer.calls, start=int(text_is_open)):
                        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                        yield named("content_block_start", index=index, content_block=block)
                        part = {"type": "input_json_delta", "partial_json": call.arguments}
                        yield named("content_block_delta", index=index, delta=part)
                        yield named("content_block_stop", index=index)
                    sampled = {"output_tokens": usage([answer])[1]}
                    yield named("message_delta", delta=_end(answer), usage=sampled)
    yield named("message_stop")


def _head(session: Session, model: str, prompt_tokens: int) -> dict[str, Any]:
    name = f"msg_{next(session.numbers)}"
    used = {"input_tokens": prompt_tokens, "output_tokens": 0}
    return {"id": name, "type": "message", "role": "assistant", "model": model, "usage": used}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text: Sequence[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in answer.calls
    ]
    return [*text, *calls]


def _end(answer: Answer) -> dict[str, Any]:
    if answer.calls:
        reason = "tool_use"
    elif answer.stopped_by is not None:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if answer.call.completion.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}
