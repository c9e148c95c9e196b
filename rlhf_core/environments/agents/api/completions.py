"""OpenAI's completions of a text or of tokens, and vLLM's tokenization."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from aiohttp import web
from pydantic import Field

from rlhf_core.chat.encoding import decode_completion
from rlhf_core.chat.special_tokens import token_ids
from rlhf_core.environments.agents.api.chat import (
    IGNORED,
    LAST_EVENT,
    ONLY,
    StreamOptions,
    failed,
    head,
    usage_of,
)
from rlhf_core.environments.agents.api.chat_messages import normalised
from rlhf_core.environments.agents.api.conversations import Conversations
from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.api.reading import ApiRequest, StopTexts, read_request
from rlhf_core.environments.agents.api.replies import Answer
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.api.sse import event, stream
from rlhf_core.environments.agents.api.text_deltas import until_any
from rlhf_core.environments.agents.program import CallOptions


class TextRequest(ApiRequest):
    ignored: ClassVar[frozenset[str]] = IGNORED
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = ONLY

    prompt: str | list[int]
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    stop: StopTexts = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Literal[0] | None = None


class TokenizeRequest(ApiRequest):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field(default=[])


async def answer_text(session: Session, request: web.Request) -> web.StreamResponse:
    text = read_request(await request.read(), TextRequest)
    if text.stream:
        return await stream(request, _events(session, text), failed)
    return web.json_response(_completion(session, text, await _answers(session, text)))


async def _answers(session: Session, text: TextRequest) -> list[Answer]:
    policy = session.policy
    prompt = token_ids(policy.tokenizer, text.prompt) if isinstance(text.prompt, str) else text.prompt

    async def one() -> Answer:
        temperature, top_p = session.sampling(text.temperature, text.top_p)
        options = CallOptions(temperature=temperature, top_p=top_p)
        call = await policy.generate(prompt, max_tokens=text.max_tokens, stop=text.stop, options=options)
        written = decode_completion(policy.tokenizer, call.completion.token_ids)
        return Answer(call, until_any(written, text.stop))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(text.n)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def _completion(session: Session, text: TextRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "logprobs": None if text.logprobs is None else _logprobs(session, answer),
        }
        for index, answer in enumerate(answers)
    ]
    return {**head(session, text.model, "text_completion"), "choices": choices, "usage": usage_of(answers)}


async def _events(session: Session, text: TextRequest) -> AsyncGenerator[bytes, None]:
    """Yield each reply as one chunk."""
    whole = _completion(session, text, await _answers(session, text))
    usage = whole.pop("usage")
    yield event(whole)
    if text.stream_options.include_usage:
        yield event({**whole, "choices": [], "usage": usage})
    yield LAST_EVENT


def _logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    completion = answer.call.completion
    texts = [str(session.policy.tokenizer.decode([token])) for token in completion.token_ids]
    return {
        "tokens": texts, "token_logprobs": list(completion.logprobs), "top_logprobs": None,
        "text_offset": [sum(len(text) for text in texts[:place]) for place in range(len(texts))],
    }  # fmt: skip


async def answer_tokenize(session: Session, request: web.Request) -> web.StreamResponse:
    policy = session.policy
    parameters = read_request(await request.read(), TokenizeRequest)
    if (parameters.messages is None) == (parameters.prompt is None):
        raise RequestError("give one of `prompt` and `messages`", "prompt")
    if parameters.prompt is not None:
        tokens = token_ids(policy.tokenizer, parameters.prompt)
    else:
        messages = normalised(parameters.messages or [], policy.images)
        tokens = Conversations(policy.tokenizer, policy.images).ask(messages, parameters.tools).token_ids
    return web.json_response({"count": len(tokens), "max_model_len": policy.max_length, "tokens": tokens})
