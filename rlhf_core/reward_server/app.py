"""The application of a reward server: `POST /score` in our format, `POST /get_reward` in OpenRLHF's, `GET /health`."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.errors import StageError
from rlhf_core.reward_server.batching import Batcher, BusyError
from rlhf_core.reward_server.model import ServedModel
from rlhf_core.reward_server.settings import Serving

_SHOWN_PROBLEMS = 3
_PLACES = "POST /score and /get_reward give rewards, GET /health says what is served"
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt: list[_Message] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None


class ScoreRequest(BaseModel):
    """A request of rewards/http.py. The conversation before a completion is `rows[i]["prompt"]`, else `prompts[i]`."""

    model_config = ConfigDict(extra="forbid")

    completions: list[str] = Field(min_length=1)
    prompts: list[str]
    rows: list[_Row] | None = None

    def columns(self) -> dict[str, Sequence[Any] | None]:
        return {"prompts": self.prompts, "rows": self.rows}


class QueryRequest(BaseModel):
    """A request of OpenRLHF: whole conversations rendered by its template. `prompts` and `labels` are ignored."""

    query: list[str] = Field(min_length=1)


R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class RefusedError(Exception):
    """Raised to reject a request with `status` and `text`, which contains no secret of the server."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def reward_app(serving: Serving) -> web.Application:
    """Load the model, and return the application that serves it. Raises StageError if it cannot be loaded."""
    torch.set_num_threads(serving.threads)
    worker = _Worker(serving)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"ready": True, "model": serving.model, "key": serving.key})

    async def score(request: web.Request) -> web.Response:
        return web.json_response({"rewards": await worker.score(await worker.read(request, ScoreRequest))})

    async def get_reward(request: web.Request) -> web.Response:
        rewards = await worker.score_texts(await worker.read(request, QueryRequest))
        return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    app = web.Application(middlewares=[_errors_as_json])
    app.add_routes([web.get("/health", health), web.post("/score", score), web.post("/get_reward", get_reward)])
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every error of a request as {"detail": TEXT}."""
    try:
        return await handler(request)
    except RefusedError as error:
        return _error(str(error), error.status, _HEADERS.get(error.status))
    except StageError as error:
        return _error(str(error), 422)
    except web.HTTPException as error:
        text = f"there is no {request.method} {request.path} here: {_PLACES}"
        allowed = error.headers.get("Allow")
        return _error(text, error.status, {"Allow": allowed} if allowed else None)
    except Exception:
        logging.exception("a request failed")
        return _error("the server failed: its log has the reason", 500)


def _error(text: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"detail": text}, status=status, headers=headers)


class _Worker:
    """One process of a server: its model, a thread for tokenising and a thread for computing."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._model = ServedModel(serving.folder, dtype=serving.dtype, normalize=serving.normalize)
        self._batcher = Batcher(
            self._model.scores, tokens_per_batch=serving.tokens_per_batch, max_waiting=serving.max_waiting
        )

    async def read(self, request: web.Request, form: type[R]) -> R:
        """Return the parsed request. Raises RefusedError if it lacks the token, is too large or late, or is invalid."""
        self._require_token(request.headers.get("Authorization", ""))
        try:
            body = await self._body(request)
        except TimeoutError:
            raise RefusedError(408, "the rest of the request did not come in time: send it again") from None
        except ConnectionResetError:  # no client reads the response
            raise RefusedError(400, "the client left before it had sent all of the request") from None
        try:
            return await self._in_thread(form.model_validate_json, body)
        except ValidationError as error:
            raise RefusedError(422, _problems(error)) from None

    async def _body(self, request: web.Request) -> bytes:
        """Read the body. Raises TimeoutError if the client is too slow, ConnectionResetError if it disconnects."""
        serving, now = self._serving, asyncio.get_running_loop().time
        end = now() + serving.body_seconds
        body = bytearray()
        async with asyncio.timeout(serving.silent_seconds) as limit:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > serving.max_bytes:
                    raise RefusedError(413, f"the request is larger than {serving.max_bytes} bytes: send fewer texts")
                limit.reschedule(min(end, now() + serving.silent_seconds))
        return bytes(body)

    async def score(self, request: ScoreRequest) -> list[float]:
        count = self._require_max_texts(request.completions)
        for name, column in request.columns().items():
            if column is not None and len(column) != count:
                raise RefusedError(422, f"{len(column)} `{name}` for {count} completions")
        rows = request.rows or [_Row()] * count

        def tokens() -> list[list[int]]:
            return [
                self._model.tokens(f"completion {index}", _messages(row, prompt), completion, row.tools)
                for index, (completion, prompt, row) in enumerate(
                    zip(request.completions, request.prompts, rows, strict=True)
                )
            ]

        return await self._rewards(tokens, "completion")

    async def score_texts(self, request: QueryRequest) -> list[float]:
        self._require_max_texts(request.query)

        def tokens() -> list[list[int]]:
            return [self._model.tokens_of_text(f"text {index}", text) for index, text in enumerate(request.query)]

        return await self._rewards(tokens, "text")

    async def _rewards(self, tokens: Callable[[], list[list[int]]], what: str) -> list[float]:
        try:
            scores = await self._batcher(await self._in_thread(tokens))
        except BusyError:
            raise RefusedError(
                429, f"more than {self._serving.max_waiting} texts are waiting: ask again later"
            ) from None
        return [self._model.reward(f"{what} {index}", score) for index, score in enumerate(scores)]

    def _require_max_texts(self, texts: Sequence[str]) -> int:
        if len(texts) > self._serving.max_texts:
            raise RefusedError(
                413, f"the request has {len(texts)} texts, more than {self._serving.max_texts}: send fewer"
            )
        return len(texts)

    def _require_token(self, header: str) -> None:
        """Require `Bearer TOKEN`, or TOKEN as the password of a URL, all that OpenRLHF's client can send."""
        kind, _, token = header.partition(" ")
        if kind.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                token = ""
        if kind.lower() not in ("bearer", "basic") or not secrets.compare_digest(
            token.strip().encode(), self._serving.token.encode()
        ):
            raise RefusedError(401, "the token is missing or wrong: send the header `Authorization: Bearer TOKEN`")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, function, *arguments)


def _messages(row: _Row, prompt: str) -> list[dict[str, Any]]:
    if row.prompt is None:
        return [{"role": "user", "content": prompt}]
    return [message.model_dump() for message in row.prompt]


def _problems(error: ValidationError) -> str:
    problems = [f"`{'.'.join(map(str, p['loc'])) or 'the request'}`: {p['msg']}" for p in error.errors()]
    more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + more
