"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.api.chat_messages import normalised
from rlhf_core.environments.agents.api.errors import RequestError, openai_error
from rlhf_core.environments.agents.api.reading import ApiRequest, Part, StopTexts, read_request
from rlhf_core.environments.agents.api.replies import Answer, Begun, Delta, Ended, answers_to, streamed, usage
from rlhf_core.environments.agents.api.scores import token_scores
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.api.sse import event, stream
from rlhf_core.environments.agents.api.wanted import ANY_OBJECT, Wanted, names_to_call, read_tools
from rlhf_core.rollout.engine import MOST_TOP_LOGPROBS

# Parameters without effect on sampling here. The seed is the run's, so that episodes repeat with it.
IGNORED = frozenset({
    "seed", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
    "prompt_cache_retention", "reasoning_effort", "verbosity",
})  # fmt: skip
# The one value that each may have: log-probs of another distribution than the policy's could not be trained on.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "best_of": (1,), "echo": (False,), "modalities": (["text"],),
}  # fmt: skip
LAST_EVENT = b"data: [DONE]\n\n"


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: bool = False  # without effect


class ChatRequest(ApiRequest):
    ignored: ClassVar[frozenset[str]] = IGNORED
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = ONLY

    messages: list[dict[str, Any]] = Field(min_length=1)
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: StopTexts = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[dict[str, Any]] = Field(default=[])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True  # false: one call, if `tool_choice` asks for any
    response_format: dict[str, Any] = Field(default={"type": "text"})
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_LOGPROBS)

    def wanted(self, session: Session) -> Wanted:
        none, must_call = _choice(self.tool_choice, self.tools)
        return Wanted(
            messages=normalised(self.messages, session.policy.images),
            tools=[] if none else read_tools(self.tools),
            must_call=must_call,
            parallel_calls=self.parallel_tool_calls,
            schema=_schema(self.response_format),
            count=self.n,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            stop=self.stop,
            top_logprobs=self.top_logprobs if self.logprobs else 0,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def _choice(choice: Any, tools: Sequence[Any]) -> tuple[bool, list[str]]:
    """Return whether the policy is shown no tools, and the names of those of which it must call one."""
    match choice:
        case "none":
            return True, []
        case "auto" | "required":
            return False, names_to_call(read_tools(tools), choice)
        case {"type": "function", "function": {"name": str(name)}}:
            return False, names_to_call(read_tools(tools), "required", name)
    raise RequestError(
        f"tool_choice is {choice!r:.100}; it is none, auto, required, or a function by its name", "tool_choice"
    )


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    match form:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"name": str(), "schema": dict(schema)}}:
            return schema
    raise RequestError(
        f"response_format is {form!r:.100}; it is text, json_object, or json_schema with a name and a schema",
        "response_format",
    )


def failed(error: RequestError) -> bytes:
    return event(openai_error(error))


async def answer_chat(session: Session, request: web.Request) -> web.StreamResponse:
    chat = read_request(await request.read(), ChatRequest)
    if chat.stream:
        return await stream(request, _events(session, chat), failed)
    wanted = chat.wanted(session)
    return web.json_response(_completion(session, chat, await answers_to(session, wanted)))


def _completion(session: Session, chat: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {**answer.message, "content": answer.text or None, "refusal": None},
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(session.policy.tokenizer, answer.call.completion, 0) if chat.logprobs else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**head(session, chat.model, "chat.completion"), "choices": choices, "usage": usage_of(answers)}


async def _events(session: Session, chat: ChatRequest) -> AsyncGenerator[bytes, None]:
    common = head(session, chat.model, "chat.completion.chunk")
    answers = []

    def chunk(index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return event({**common, "choices": [choice]})

    async with aclosing(streamed(session, chat.wanted(session))) as pieces:
        async for piece in pieces:
            match piece:
                case Begun():
                    for index in range(chat.n):
                        yield chunk(index, {"role": "assistant", "content": ""})
                case Delta(index, text, tokens, first):
                    logprobs = _logprobs(session.policy.tokenizer, tokens, first) if chat.logprobs else None
                    if text or (logprobs and logprobs["content"]):
                        yield chunk(index, {"content": text} if text else {}, logprobs=logprobs)
                case Ended(index, answer):
                    answers.append(answer)
                    for number, call in enumerate(answer.calls):
                        named = {"name": call.name, "arguments": ""}
                        begun = {"index": number, "id": call.id, "type": "function", "function": named}
                        yield chunk(index, {"tool_calls": [begun]})
                        arguments = {"index": number, "function": {"arguments": call.arguments}}
                        yield chunk(index, {"tool_calls": [arguments]})
                    yield chunk(index, {}, answer.finish_reason)
    if chat.stream_options.include_usage:
        yield event({**common, "choices": [], "usage": usage_of(answers)})
    yield LAST_EVENT


def head(session: Session, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"reply-{next(session.numbers)}", "object": kind, "created": int(time.time()), "model": model}


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, sampled = usage(answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(tokenizer: Tokenizer, tokens: Any, first: int) -> dict[str, Any]:
    return {"content": token_scores(tokenizer, tokens, first), "refusal": None}
