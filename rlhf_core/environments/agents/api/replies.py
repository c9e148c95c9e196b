"""Replies of the policy to a request of any API: sampled, parsed and recorded, at once or while they are sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import decode_completion, stop_token_ids
from rlhf_core.environments.agents.api.chat_messages import normalised_reply
from rlhf_core.environments.agents.api.conversations import PolicyPrompt
from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.api.text_deltas import TextDeltas, until_any
from rlhf_core.environments.agents.api.wanted import Wanted
from rlhf_core.environments.agents.program import Call, CallOptions

if TYPE_CHECKING:
    from rlhf_core.rollout.engine import Unfinished
    from rlhf_core.types import Completion


@dataclass(frozen=True, slots=True)
class FunctionCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply."""

    call: Call
    text: str  # beside the calls, up to a stop text
    calls: Sequence[FunctionCall] = ()
    stopped_by: str | None = None  # a stop text of the request

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.call.completion.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The message of chat completions, as a client repeats it."""
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in self.calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True)
class Begun:
    """All replies of a request are being sampled."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of a reply that were sampled since the last progress."""

    index: int
    text: str
    tokens: Completion | Unfinished  # all so far
    first: int  # of them, that is new


@dataclass(frozen=True, slots=True)
class Ended:
    index: int
    answer: Answer


def usage(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of all replies to it."""
    return len(answers[0].call.prompt), sum(len(answer.call.completion.token_ids) for answer in answers)


async def answers_to(session: Session, wanted: Wanted) -> list[Answer]:
    """Sample all replies. If one is rejected, the others are cancelled, and its error is raised.

    Raises RequestError, CallError, or StageError of the chat template.
    """
    prompt = _prompt(session, wanted)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_sampled(session, prompt, wanted, None)) for _ in range(wanted.count)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    answers = [task.result() for task in tasks]
    for answer in answers:
        _record(session, prompt, answer)
    return answers


async def streamed(session: Session, wanted: Wanted) -> AsyncGenerator[Begun | Delta | Ended, None]:
    """Sample all replies, and yield what there is of each while it is sampled. Raises as `answers_to`.

    Close it to cancel those that are not whole, such as when the client is gone.
    """
    prompt = _prompt(session, wanted)
    arrived: asyncio.Queue[tuple[int, Unfinished | None]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_sampled(session, prompt, wanted, _Listener(index, arrived)))
        for index in range(wanted.count)
    ]
    for index, task in enumerate(tasks):
        task.add_done_callback(partial(_told, arrived, index))
    try:
        await asyncio.sleep(0)  # a call beyond the limits fails at once
        for task in tasks:
            if task.done():
                task.result()
        yield Begun(len(prompt.token_ids))
        states = [_State(session, wanted) for _ in tasks]
        left = len(tasks)
        while left:
            index, progress = await arrived.get()
            if progress is not None:
                yield states[index].delta(index, progress)
                continue
            left -= 1
            last, answer = states[index].end(index, tasks[index].result())
            _record(session, prompt, answer)
            yield last
            yield Ended(index, answer)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _told(arrived: asyncio.Queue[tuple[int, Unfinished | None]], index: int, _: object) -> None:
    arrived.put_nowait((index, None))


class _Listener:
    def __init__(self, index: int, arrived: asyncio.Queue[tuple[int, Unfinished | None]]) -> None:
        self._index, self._arrived = index, arrived

    def __call__(self, progress: Unfinished) -> None:
        self._arrived.put_nowait((self._index, progress))


class _State:
    """The part of one reply that its client has been shown."""

    def __init__(self, session: Session, wanted: Wanted) -> None:
        parser = session.parser if wanted.tools and wanted.structure is None else None
        hold = (parser is not None and parser.marker is None) or (wanted.structure is not None and bool(wanted.tools))
        marker = None if parser is None else parser.marker
        self._text = TextDeltas(session.policy.tokenizer, wanted.stop, marker, hold=hold)
        self._tokens = 0

    def delta(self, index: int, progress: Unfinished) -> Delta:
        return self._next(index, self._text.more(progress.token_ids), progress)

    def end(self, index: int, answer: Answer) -> tuple[Delta, Answer]:
        """Return the last delta, and the answer with the text that the client has."""
        last = self._next(index, self._text.rest(answer.text), answer.call.completion)
        return last, replace(answer, text=self._text.shown)

    def _next(self, index: int, text: str, tokens: Completion | Unfinished) -> Delta:
        first, self._tokens = self._tokens, len(tokens.token_ids)
        return Delta(index, text, tokens, first)


def _prompt(session: Session, wanted: Wanted) -> PolicyPrompt:
    if wanted.tools and not wanted.must_call and wanted.schema is None and session.parser is None:
        raise RequestError("`tools` need `environment.tool_parser` in the recipe", "tools")
    return session.conversations.ask(wanted.messages, wanted.tools)


def _record(session: Session, prompt: PolicyPrompt, answer: Answer) -> None:
    session.conversations.add(prompt, normalised_reply(answer.message), answer.call)


async def _sampled(session: Session, prompt: PolicyPrompt, wanted: Wanted, heard: _Listener | None) -> Answer:
    policy = session.policy
    sampling = session.sampling(wanted.temperature, wanted.top_p)
    options = CallOptions(wanted.structure, wanted.top_logprobs, *sampling, heard)
    call = await policy.generate(
        prompt.token_ids, max_tokens=wanted.max_tokens, stop=wanted.stop, messages=prompt.written,
        images=prompt.images, options=options,
    )  # fmt: skip
    whole = decode_completion(policy.tokenizer, call.completion.token_ids)
    text = until_any(whole, wanted.stop)
    stopped_by = next((each for each in wanted.stop if whole[len(text) :].startswith(each)), None)
    if not wanted.tools:
        return Answer(call, text, stopped_by=stopped_by)
    if wanted.structure is not None:
        return Answer(call, *_structured(whole, call.number), stopped_by)
    return Answer(call, *await _parsed(session, call, text, wanted.tools), stopped_by)


def _structured(text: str, number: int) -> tuple[str, list[FunctionCall]]:
    """Read a reply of a structure with calls: a list of these, or other text; also if it was cut."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        return text, []
    return "", _calls(number, [(each["name"], each["parameters"]) for each in value])


async def _parsed(
    session: Session, call: Call, text: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[FunctionCall]]:
    """Separate the calls in a reply, in the format of the model, from its text."""
    assert session.parser is not None
    tokens = call.completion.token_ids
    if tokens[-1] in stop_token_ids(session.policy.tokenizer):
        tokens = tokens[:-1]
    # The marks around calls are special tokens in some models.
    parsed = await session.parser.read(str(session.policy.tokenizer.decode(list(tokens))), tools)
    if not parsed.calls:
        return text, []
    return parsed.content, _calls(call.number, [(each.name, each.arguments) for each in parsed.calls])


def _calls(number: int, calls: Sequence[tuple[str, Any]]) -> list[FunctionCall]:
    return [
        FunctionCall(f"call-{number}-{index}", name, json.dumps(arguments))
        for index, (name, arguments) in enumerate(calls)
    ]
