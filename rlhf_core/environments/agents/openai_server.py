"""OpenAI API of the policy: each episode has a URL and a key of its own, and its calls are recorded.

Listens on the loopback interface alone, in the event loop of the episodes. A request whose client disconnects is
cancelled, and no longer sampled.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from rlhf_core.chat.encoding import decode_completion, stop_token_ids
from rlhf_core.chat.special_tokens import token_ids
from rlhf_core.environments.agents.conversations import Conversations, PolicyPrompt
from rlhf_core.environments.agents.openai_replies import (
    LAST_EVENT,
    Answer,
    chat_completion,
    chat_events,
    event,
    text_completion,
    text_events,
)
from rlhf_core.environments.agents.openai_requests import (
    MODEL,
    ChatRequest,
    RequestError,
    TextRequest,
    TokenizeRequest,
    normalised,
    read_request,
)
from rlhf_core.environments.agents.program import Call, CallError, Policy
from rlhf_core.errors import StageError
from rlhf_core.rollout.tool_calls import ToolCallParser

_LONGEST_BODY = 2**22  # bytes
_LONGEST_BODY_WITH_IMAGES = 2**26  # each is in base64, again in every request of a conversation
_BACKLOG = 1024  # connections that wait to be accepted: all episodes begin at once
_SHUTDOWN_SECONDS = 1.0  # for answers that are being written


@dataclass(slots=True)
class _Session:
    """One episode."""

    key: str
    policy: Policy
    conversations: Conversations
    requests: set[asyncio.Task[Any]] = field(default_factory=set)


class OpenAIServer:
    """Runs while any episode is open, in the event loop that opened the first one."""

    def __init__(self, tool_parser: ToolCallParser | None = None) -> None:
        """tool_parser: none: requests with tools are rejected."""
        self._tool_parser = tool_parser
        self._numbers = itertools.count()
        self._sessions: dict[str, _Session] = {}
        self._starting: asyncio.Task[tuple[web.AppRunner, int]] | None = None
        self._users = 0
        self._longest_body = _LONGEST_BODY  # of all episodes, whose policy is one

    @asynccontextmanager
    async def episode(self, policy: Policy) -> AsyncIterator[tuple[str, str]]:
        """Yield base URL and key for `policy`, both valid within the context only."""
        self._users += 1
        name = f"episode-{next(self._numbers)}"
        session = _Session(secrets.token_urlsafe(24), policy, Conversations(policy.tokenizer, policy.images))
        try:
            if self._starting is None:
                self._longest_body = _LONGEST_BODY if policy.images is None else _LONGEST_BODY_WITH_IMAGES
                self._starting = asyncio.create_task(self._start())
            _, port = await asyncio.shield(self._starting)
            self._sessions[name] = session
            yield f"http://127.0.0.1:{port}/{name}/v1", session.key
        finally:
            self._sessions.pop(name, None)
            left = list(session.requests)
            for request in left:
                request.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._users -= 1
            if self._users == 0 and self._starting is not None:
                starting, self._starting = self._starting, None
                runner, _ = await starting
                await runner.cleanup()

    async def _start(self) -> tuple[web.AppRunner, int]:
        application = web.Application(client_max_size=self._longest_body)
        routes: Mapping[str, Callable[[_Session, web.Request], Awaitable[web.StreamResponse]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._text,
            "/tokenize": self._tokenize,
        }
        for path, answer in routes.items():
            application.router.add_post(f"/{{episode}}{path}", partial(self._answered, answer))
        application.router.add_get("/{episode}/v1/models", partial(self._answered, self._models))
        application.router.add_route("*", "/{path:.*}", partial(self._answered, self._unknown))
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        return runner, int(listener.getsockname()[1])

    async def _answered(
        self, answer: Callable[[_Session, web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        """Return the response of `answer`, or its error in the API's format."""
        session = self._sessions.get(request.path.split("/")[1])
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if session is None or not hmac.compare_digest(key.encode(), session.key.encode()):
            return _error("this is no key of an episode that is being played at this URL", 401, "invalid_api_key")
        task = asyncio.current_task()
        assert task is not None
        session.requests.add(task)
        try:
            return await answer(session, request)
        except RequestError as error:
            return _error(str(error), error.status, error.code, error.param)
        except CallError as error:
            return _error(str(error), 400, error.code)
        except StageError as error:  # of the chat template
            return _error(str(error), 400, "invalid_messages")
        except web.HTTPRequestEntityTooLarge:
            return _error(f"the body has more than {self._longest_body // 2**20} MiB", 413, "body_too_large")
        finally:
            session.requests.discard(task)

    async def _models(self, session: _Session, _: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "alignment"}
        model |= {"max_model_len": session.policy.max_length}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, _: _Session, request: web.Request) -> web.StreamResponse:
        return _error(f"there is no {request.method} {request.path}", 404, "not_found")

    async def _tokenize(self, session: _Session, request: web.Request) -> web.StreamResponse:
        policy = session.policy
        parameters = read_request(await request.read(), TokenizeRequest, policy.temperature)
        if (parameters.messages is None) == (parameters.prompt is None):
            raise RequestError("give one of `prompt` and `messages`", "prompt")
        if parameters.prompt is not None:
            tokens = token_ids(policy.tokenizer, parameters.prompt)
        else:
            messages = normalised(parameters.messages or [], policy.images)
            tokens = Conversations(policy.tokenizer, policy.images).ask(messages, parameters.tools).token_ids
        return web.json_response({"count": len(tokens), "max_model_len": policy.max_length, "tokens": tokens})

    async def _text(self, session: _Session, request: web.Request) -> web.StreamResponse:
        policy = session.policy
        parameters = read_request(await request.read(), TextRequest, policy.temperature)
        prompt = (
            token_ids(policy.tokenizer, parameters.prompt) if isinstance(parameters.prompt, str) else parameters.prompt
        )
        ask = partial(policy.generate, prompt, max_tokens=parameters.max_tokens, stop=parameters.stop)
        calls = await _several(ask, parameters.n)
        answers = [Answer(call, {"content": _content(policy, call, parameters.stop)}) for call in calls]
        logprobs = parameters.logprobs is not None
        if parameters.stream:
            usage = parameters.stream_options.include_usage
            return await _stream(request, text_events(answers, policy.tokenizer, logprobs=logprobs, with_usage=usage))
        return web.json_response(text_completion(answers, policy.tokenizer, logprobs=logprobs))

    async def _chat(self, session: _Session, request: web.Request) -> web.StreamResponse:
        policy = session.policy
        chat = read_request(await request.read(), ChatRequest, policy.temperature)
        tools = chat.tools if chat.tool_choice == "auto" else []
        if tools and self._tool_parser is None:
            raise RequestError("`tools` need `environment.tool_parser` in the recipe", "tools")
        prompt = session.conversations.ask(normalised(chat.messages, policy.images), tools)
        ask = partial(
            policy.generate, prompt.token_ids, max_tokens=chat.most_tokens, stop=chat.stop, messages=prompt.written,
            images=prompt.images,
        )  # fmt: skip
        calls = await _several(ask, chat.n)
        answers = [await self._answer(policy, prompt, call, chat.stop) for call in calls]
        for answer in answers:
            session.conversations.add(prompt, normalised_reply(answer.message), answer.call)
        if chat.stream:
            usage = chat.stream_options.include_usage
            return await _stream(
                request, chat_events(answers, policy.tokenizer, logprobs=chat.logprobs, with_usage=usage)
            )
        return web.json_response(chat_completion(answers, policy.tokenizer, logprobs=chat.logprobs))

    async def _answer(self, policy: Policy, prompt: PolicyPrompt, call: Call, stop: Sequence[str]) -> Answer:
        message: dict[str, Any] = {"role": "assistant", "content": _content(policy, call, stop)}
        if not prompt.tools:
            return Answer(call, message)
        assert self._tool_parser is not None
        tokens = call.completion.token_ids
        if tokens[-1] in stop_token_ids(policy.tokenizer):
            tokens = tokens[:-1]
        # The marks around calls are special tokens in some models.
        parsed = await self._tool_parser.read(str(policy.tokenizer.decode(list(tokens))))
        if parsed.calls:
            message["content"] = parsed.content
            message["tool_calls"] = [
                {
                    "id": f"call-{call.number}-{index}",
                    "type": "function",
                    "function": {"name": each.name, "arguments": json.dumps(each.arguments)},
                }
                for index, each in enumerate(parsed.calls)
            ]
        return Answer(call, message)


def normalised_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply as a client will repeat it."""
    user = {"role": "user", "content": ""}  # so that there is something to reply to
    return normalised([message, user])[0]


async def _several(ask: Callable[[], Awaitable[Call]], count: int) -> list[Call]:
    """Sample `count` replies concurrently; if one is rejected, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(ask())) for _ in range(count)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _awaited(call: Awaitable[Call]) -> Call:
    return await call


def _content(policy: Policy, call: Call, stop: Sequence[str]) -> str:
    """Return the text of a reply, up to its stop text."""
    text = decode_completion(policy.tokenizer, call.completion.token_ids)
    ends = [text.find(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text


async def _stream(request: web.Request, events: Iterable[Mapping[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for each in events:
        await response.write(event(each))
    await response.write(LAST_EVENT)
    await response.write_eof()
    return response


def _error(message: str, status: int, code: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status)
