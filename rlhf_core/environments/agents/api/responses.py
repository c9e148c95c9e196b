"""OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from rlhf_core.environments.agents.api.chat import failed
from rlhf_core.environments.agents.api.chat_messages import normalised
from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.api.reading import ApiRequest, Part, read_request
from rlhf_core.environments.agents.api.replies import Answer, answers_to, streamed
from rlhf_core.environments.agents.api.response_events import ResponseEvents
from rlhf_core.environments.agents.api.response_items import chat_messages, chat_tools, items_of, schema_of
from rlhf_core.environments.agents.api.scores import token_scores
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.api.sse import stream
from rlhf_core.environments.agents.api.wanted import Wanted, names_to_call
from rlhf_core.rollout.engine import MOST_TOP_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # the latter of reasoning, which there is none of


class Text(Part):
    format: dict[str, Any] = Field(default={"type": "text"})
    verbosity: Any = None  # without effect


class StreamOptions(Part):
    include_obfuscation: bool = False  # without effect


class ResponsesRequest(ApiRequest):
    ignored: ClassVar[frozenset[str]] = frozenset({
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "prompt_cache_retention",
        "reasoning",
    })  # fmt: skip
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"background": (False,), "truncation": ("disabled",)}

    input: str | list[dict[str, Any]]
    instructions: str = ""
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = Field(default=[])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True  # false: one call, if `tool_choice` asks for any
    text: Text = Text()
    include: list[str] = Field(default=[])
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def with_logprobs(self) -> bool:
        return _LOGPROBS in self.include

    def conversation(self, session: Session) -> list[dict[str, Any]]:
        """Return the messages of the earlier response, if there is one, and the input's, without the instructions."""
        if unknown := next((each for each in self.include if each not in _INCLUDED), None):
            raise RequestError(f"include has {unknown!r}, which this server does not have", "include")
        before: Sequence[Any] = ()
        if self.previous_response_id is not None:
            if self.previous_response_id not in session.responses:
                name = self.previous_response_id
                raise RequestError(f"this episode has no response {name!r}", "previous_response_id", "not_found", 404)
            before = session.responses[self.previous_response_id]
        given: Sequence[Any] = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else chat_messages(self.input)
        )
        if not given:
            raise RequestError("input is empty", "input")
        return [*before, *given]

    def wanted(self, session: Session, conversation: Sequence[Mapping[str, Any]]) -> Wanted:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = chat_tools(self.tools)
        none, must_call = _choice(self.tool_choice, tools)
        return Wanted(
            messages=normalised([*system, *conversation], session.policy.images),
            tools=[] if none else tools,
            must_call=must_call,
            parallel_calls=self.parallel_tool_calls,
            schema=schema_of(self.text.format),
            max_tokens=self.max_output_tokens,
            top_logprobs=self.top_logprobs if self.with_logprobs else 0,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[bool, list[str]]:
    """Return whether the policy is shown no tools, and the names of those of which it must call one."""
    match choice:
        case "none":
            return True, []
        case "auto" | "required":
            return False, names_to_call(tools, choice)
        case {"type": "function", "name": str(name)}:
            return False, names_to_call(tools, "required", name)
    raise RequestError(
        f"tool_choice is {choice!r:.100}; it is none, auto, required, or a function by its name", "tool_choice"
    )


async def answer_responses(session: Session, request: web.Request) -> web.StreamResponse:
    asked = read_request(await request.read(), ResponsesRequest)
    if asked.stream:
        return await stream(request, _events(session, asked), failed)
    conversation = asked.conversation(session)
    (answer,) = await answers_to(session, asked.wanted(session, conversation))
    empty = _empty(session, asked)
    return web.json_response(_whole(session, asked, empty, conversation, answer))


async def _events(session: Session, asked: ResponsesRequest) -> AsyncGenerator[bytes, None]:
    conversation = asked.conversation(session)
    empty = _empty(session, asked)

    def whole(answer: Answer) -> dict[str, Any]:
        return _whole(session, asked, empty, conversation, answer)

    events = ResponseEvents(session.policy.tokenizer, empty, whole, with_logprobs=asked.with_logprobs)
    async with aclosing(streamed(session, asked.wanted(session, conversation))) as pieces:
        async for piece in pieces:
            for each in events.of(piece):
                yield each


def _empty(session: Session, asked: ResponsesRequest) -> dict[str, Any]:
    """Return a response before anything of it is sampled."""
    temperature, top_p = session.sampling(asked.temperature, asked.top_p)
    return {
        "id": f"resp_{next(session.numbers)}",
        "object": "response",
        "created_at": time.time(),
        "model": asked.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions or None,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "temperature": session.policy.temperature if temperature is None else temperature,
        "text": {"format": asked.text.format},
        "tool_choice": asked.tool_choice,
        "tools": asked.tools,
        "top_p": 1.0 if top_p is None else top_p,
        "usage": None,
    }


def _whole(
    session: Session, asked: ResponsesRequest, empty: Mapping[str, Any], conversation: Sequence[Any], answer: Answer
) -> dict[str, Any]:
    """Return the response, and keep its conversation for one that follows it."""
    session.responses[empty["id"]] = [*conversation, answer.message]
    prompt, sampled = len(answer.call.prompt), len(answer.call.completion.token_ids)
    was_cut = answer.call.completion.finish_reason == "length" and not answer.calls
    scores = token_scores(session.policy.tokenizer, answer.call.completion) if asked.with_logprobs else []
    return {
        **empty,
        "status": "incomplete" if was_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "output": items_of(empty["id"], answer, scores),
        "usage": {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }  # fmt: skip
