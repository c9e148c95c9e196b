"""The application of a reward server: `POST /score` in our form, `POST /get_reward` in OpenRLHF's, `GET /health`."""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.config import STARTUP_FAILURE

from rlhf_core.errors import AlignmentError, StageError
from rlhf_core.reward_server.batching import Batcher, BusyError
from rlhf_core.reward_server.model import ServedModel
from rlhf_core.reward_server.settings import Serving

_SHOWN_PROBLEMS = 3
_PLACES = "POST /score and /get_reward give rewards, GET /health says what is served"
# The rest of a body that is refused before its end would be read as the next request.
_END = {"Connection": "close"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: _END, 413: _END, 429: {"Retry-After": "1"}}


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt: list[_Message] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None


class ScoreRequest(BaseModel):
    """What rewards/http.py sends. The conversation before a completion is `rows[i]["prompt"]`, else `prompts[i]`."""

    model_config = ConfigDict(extra="forbid")

    completions: list[str] = Field(min_length=1)
    prompts: list[str]
    rows: list[_Row] | None = None

    def columns(self) -> dict[str, Sequence[Any] | None]:
        return {"prompts": self.prompts, "rows": self.rows}


class QueryRequest(BaseModel):
    """What OpenRLHF sends: whole conversations as its template wrote them; `prompts` and `labels` are not read."""

    query: list[str] = Field(min_length=1)


R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class RefusedError(Exception):
    """A request that is answered with an error. No secret of the server is in its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def reward_app(serving: Serving) -> FastAPI:
    """Loads its model when it is started, and answers only then."""
    torch.set_num_threads(serving.threads)
    worker = _Worker(serving)
    app = FastAPI(lifespan=worker.lifespan, openapi_url=None)
    _answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"ready": True, "model": serving.model, "key": serving.key}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        return JSONResponse({"rewards": await worker.answer(request, ScoreRequest, worker.score)})

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        rewards = await worker.answer(request, QueryRequest, worker.score_texts)
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    return app


def _answer_errors(app: FastAPI) -> None:
    """Every error of a request has the form {"detail": TEXT}."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status, _HEADERS.get(error.status))

    @app.exception_handler(StageError)
    async def unusable(request: Request, error: StageError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        text = f"there is no {request.method} {request.url.path} here: {_PLACES}"
        return JSONResponse({"detail": text}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed: its log has the reason"}, 500)


class _Worker:
    """One process of a server: its model, a thread that tokenises and a thread that computes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._model: ServedModel
        self._batcher: Batcher

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        serving = self._serving
        _end_with_parent()
        try:
            self._model = ServedModel(serving.folder, dtype=serving.dtype, normalize=serving.normalize)
        except AlignmentError as error:
            _end_unstarted(error)
            raise
        self._batcher = Batcher(
            self._model.scores, tokens_per_batch=serving.tokens_per_batch, max_waiting=serving.max_waiting
        )
        yield

    async def answer(self, request: Request, form: type[R], score: Callable[[R], Awaitable[T]]) -> T:
        """The rewards that `score` gives to a request of this form. Raises RefusedError, also as it stops."""
        try:
            return await score(await self._read(request, form))
        except asyncio.CancelledError:
            raise RefusedError(503, "the server stops: ask again later") from None

    async def _read(self, request: Request, form: type[R]) -> R:
        """Raises RefusedError for a request without the token, that is too large, or that is not of this form."""
        self._require_token(request.headers.get("authorization", ""))
        try:
            body = await self._body(request)
        except TimeoutError:
            raise RefusedError(408, "the rest of the request did not come in time: send it again") from None
        except ClientDisconnect:  # the answer is not read
            raise RefusedError(400, "the client left before it had sent all of the request") from None
        try:
            return await self._in_thread(form.model_validate_json, body)
        except ValidationError as error:
            raise RefusedError(422, _problems(error)) from None

    async def _body(self, request: Request) -> bytes:
        """Raises TimeoutError for a client that sends too slowly, ClientDisconnect for one that leaves."""
        serving, now = self._serving, asyncio.get_running_loop().time
        end = now() + serving.body_seconds
        body = bytearray()
        async with asyncio.timeout(serving.silent_seconds) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > serving.max_bytes:
                    raise RefusedError(413, f"the request is larger than {serving.max_bytes} bytes: send fewer texts")
                limit.reschedule(min(end, now() + serving.silent_seconds))
        return bytes(body)

    async def score(self, request: ScoreRequest) -> list[float]:
        count = self._require_few(request.completions)
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
        self._require_few(request.query)

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

    def _require_few(self, texts: Sequence[str]) -> int:
        if len(texts) > self._serving.max_texts:
            raise RefusedError(
                413, f"the request has {len(texts)} texts, more than {self._serving.max_texts}: send fewer"
            )
        return len(texts)

    def _require_token(self, header: str) -> None:
        """`Bearer TOKEN`; or TOKEN as the password of a URL, which is all that OpenRLHF's client can send."""
        kind, _, given = header.partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                given = ""
        if kind.lower() not in ("bearer", "basic") or not secrets.compare_digest(
            given.strip().encode(), self._serving.token.encode()
        ):
            raise RefusedError(401, "the token is missing or wrong: send the header `Authorization: Bearer TOKEN`")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, function, *arguments)


def _messages(row: _Row, prompt: str) -> list[dict[str, Any]]:
    if row.prompt is None:
        return [{"role": "user", "content": prompt}]
    return [message.model_dump() for message in row.prompt]


def _problems(error: ValidationError) -> str:
    found = [f"`{'.'.join(map(str, p['loc'])) or 'the request'}`: {p['msg']}" for p in error.errors()]
    more = f"; and {len(found) - _SHOWN_PROBLEMS} more" if len(found) > _SHOWN_PROBLEMS else ""
    return "; ".join(found[:_SHOWN_PROBLEMS]) + more


def _end_unstarted(error: AlignmentError) -> None:
    """Of a worker process: end with a sentence, where the libraries would print the calls that led to it."""
    if multiprocessing.parent_process() is not None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(STARTUP_FAILURE)


def _end_with_parent() -> None:
    """Stop in order when the process that supervises this one is gone: nobody else would stop or restart it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
