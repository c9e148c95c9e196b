"""The APIs of the policy: each episode has a URL and a key of its own, and its calls are recorded.

Listens in the event loop of the episodes; on the loopback interface alone, unless a network is given. A request whose
client disconnects is cancelled, and no longer sampled.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from rlhf_core.environments.agents.api.anthropic import answer_count, answer_messages, anthropic_error
from rlhf_core.environments.agents.api.chat import answer_chat
from rlhf_core.environments.agents.api.completions import answer_text, answer_tokenize
from rlhf_core.environments.agents.api.conversations import Conversations
from rlhf_core.environments.agents.api.errors import RequestError, openai_error
from rlhf_core.environments.agents.api.network import Network
from rlhf_core.environments.agents.api.reading import POLICY
from rlhf_core.environments.agents.api.responses import answer_responses
from rlhf_core.environments.agents.api.sessions import Session
from rlhf_core.environments.agents.program import CallError, Policy
from rlhf_core.errors import StageError
from rlhf_core.rollout.tool_calls import ToolCallParser

_LONGEST_BODY = 2**22  # bytes
_LONGEST_BODY_WITH_IMAGES = 2**26  # each is in base64, again in every request of a conversation
_BACKLOG = 1024  # connections that wait to be accepted: all episodes begin at once
_SHUTDOWN_SECONDS = 1.0  # for answers that are being written

ErrorForm = Callable[[RequestError], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    answer: Callable[[Session, web.Request], Awaitable[web.StreamResponse]]
    error: ErrorForm = openai_error
    method: str = "POST"


async def _models(session: Session, request: web.Request) -> web.StreamResponse:
    name = request.match_info.get("model")
    model = {"id": name or POLICY, "object": "model", "created": 0, "owned_by": "alignment"}
    model |= {"max_model_len": session.policy.max_length}
    return web.json_response(model if name else {"object": "list", "data": [model]})


async def _unknown(_: Session, request: web.Request) -> web.StreamResponse:
    raise RequestError(f"there is no {request.method} {request.path}", code="not_found", status=404)


_ROUTES = (
    _Route("/v1/chat/completions", answer_chat),
    _Route("/v1/completions", answer_text),
    _Route("/v1/responses", answer_responses),
    _Route("/v1/messages", answer_messages, anthropic_error),
    _Route("/v1/messages/count_tokens", answer_count, anthropic_error),
    _Route("/tokenize", answer_tokenize),
    _Route("/v1/models", _models, method="GET"),
    _Route("/v1/models/{model:.+}", _models, method="GET"),
)


class PolicyServer:
    """Runs while any episode is open, in the event loop that opened the first one."""

    def __init__(
        self,
        tool_parser: ToolCallParser | None = None,
        network: Network | None = None,
        *,
        requests_sample: bool = True,
    ) -> None:
        """tool_parser: none: requests in which the policy may choose to call tools are rejected. network: where other
        machines and containers reach it; none: the loopback interface. requests_sample: requests choose temperature and
        top_p, else the run does.
        """
        self._tool_parser, self._network, self._requests_sample = tool_parser, network, requests_sample
        self._numbers = itertools.count()
        self._sessions: dict[str, Session] = {}
        self._starting: asyncio.Task[tuple[web.AppRunner, int]] | None = None
        self._users = 0
        self._longest_body = _LONGEST_BODY  # of all episodes, whose policy is one

    @asynccontextmanager
    async def episode(self, policy: Policy) -> AsyncIterator[tuple[str, str]]:
        """Yield base URL and key for `policy`, both valid within the context only."""
        self._users += 1
        name = f"episode-{next(self._numbers)}"
        conversations = Conversations(policy.tokenizer, policy.images)
        key = secrets.token_urlsafe(24)
        session = Session(key, policy, self._tool_parser, conversations, self._requests_sample)
        try:
            if self._starting is None:
                self._longest_body = _LONGEST_BODY if policy.images is None else _LONGEST_BODY_WITH_IMAGES
                self._starting = asyncio.create_task(self._start())
            _, port = await asyncio.shield(self._starting)
            self._sessions[name] = session
            root = f"http://127.0.0.1:{port}" if self._network is None else self._network.root(port)
            yield f"{root}/{name}/v1", session.key
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
        for route in _ROUTES:
            application.router.add_route(
                route.method, f"/{{episode}}{route.path}", partial(self._answered, route.answer, route.error)
            )
        application.router.add_route("*", "/{path:.*}", partial(self._answered, _unknown, openai_error))
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        host, tls = ("127.0.0.1", None) if self._network is None else (self._network.listen, self._network.tls)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        await web.SockSite(runner, listener, backlog=_BACKLOG, ssl_context=tls).start()
        return runner, int(listener.getsockname()[1])

    async def _answered(
        self,
        answer: Callable[[Session, web.Request], Awaitable[web.StreamResponse]],
        form: ErrorForm,
        request: web.Request,
    ) -> web.StreamResponse:
        """Return the response of `answer`, or its error in the API's format."""
        session = self._sessions.get(request.path.split("/")[1])
        if session is None or not _opens(request, session.key):
            problem = "this is no key of an episode that is being played at this URL"
            return _failed(form, RequestError(problem, code="invalid_api_key", status=401))
        task = asyncio.current_task()
        assert task is not None
        session.requests.add(task)
        try:
            return await answer(session, request)
        except RequestError as error:
            return _failed(form, error)
        except CallError as error:
            return _failed(form, RequestError.of(error))
        except StageError as error:  # of the chat template
            return _failed(form, RequestError(str(error), code="invalid_messages"))
        except web.HTTPRequestEntityTooLarge:
            problem = f"the body has more than {self._longest_body // 2**20} MiB"
            return _failed(form, RequestError(problem, code="body_too_large", status=413))
        finally:
            session.requests.discard(task)


def _opens(request: web.Request, key: str) -> bool:
    """Return whether a request has the key, in the header of OpenAI's clients or of Anthropic's."""
    given = (request.headers.get("x-api-key", ""), request.headers.get("Authorization", "").removeprefix("Bearer "))
    # Bytes of a header that are no UTF-8 are surrogates in its text.
    return sum(hmac.compare_digest(each.encode(errors="surrogateescape"), key.encode()) for each in given) > 0


def _failed(form: ErrorForm, error: RequestError) -> web.Response:
    return web.json_response(form(error), status=error.status)
