"""Completions in the format of the OpenAI API: whole, or as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.openai_requests import MODEL
from rlhf_core.environments.agents.program import Call


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the choices of a reply."""

    call: Call
    message: Mapping[str, Any]  # role, content, and tool_calls if there are any; of /completions the content alone

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") else self.call.completion.finish_reason


def chat_completion(answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {**answer.message, "content": answer.message["content"] or None, "refusal": None},
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(answer, tokenizer) if logprobs else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(answers, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def chat_events(
    answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool, with_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream. A reply is one chunk: it is sampled as a whole."""
    head = _head(answers, "chat.completion.chunk")
    for index, answer in enumerate(answers):
        delta = dict(answer.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        chat_logprobs = _chat_logprobs(answer, tokenizer) if logprobs else None
        yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": chat_logprobs}]}
        yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": answer.finish_reason}]}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(answers)}


def text_completion(answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.message["content"],
            "finish_reason": answer.finish_reason,
            "logprobs": _text_logprobs(answer, tokenizer) if logprobs else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(answers, "text_completion"), "choices": choices, "usage": _usage(answers)}


def text_events(
    answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool, with_usage: bool
) -> Iterator[dict[str, Any]]:
    whole = text_completion(answers, tokenizer, logprobs=logprobs)
    usage = whole.pop("usage")
    yield whole
    if with_usage:
        yield {**whole, "choices": [], "usage": usage}


def event(data: Mapping[str, Any]) -> bytes:
    """Format a server-sent event."""
    return f"data: {json.dumps(data)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"


def _head(answers: Sequence[Answer], kind: str) -> dict[str, Any]:
    return {"id": f"reply-{answers[0].call.number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, sampled = len(answers[0].call.prompt), sum(len(a.call.completion.token_ids) for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _tokens(answer: Answer, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    completion = answer.call.completion
    texts = [str(tokenizer.decode([token])) for token in completion.token_ids]
    return list(zip(texts, completion.logprobs, strict=True))


def _chat_logprobs(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in _tokens(answer, tokenizer)
        ],
        "refusal": None,
    }


def _text_logprobs(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = _tokens(answer, tokenizer)
    ends = [sum(len(text) for text, _ in tokens[:i]) for i in range(len(tokens))]
    return {
        "tokens": [text for text, _ in tokens], "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None, "text_offset": ends,
    }  # fmt: skip
