"""A resource server as NeMo Gym has them, with a counter for each session; and rows for it."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from rlhf_core.data.formats import canonical_row

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOOLS = [
    {
        "type": "function", "name": "add", "strict": True, "description": "Adds to the counter.",
        "parameters": {
            "type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"],
            "additionalProperties": False,
        },
    },
    {"type": "function", "name": "count", "description": "", "parameters": {"type": "object", "properties": {}}},
]  # fmt: skip


def row(question: str = "add 2", *, start: int = 0, expected: int = 0, tools: Any = TOOLS) -> dict[str, Any]:
    """As the dataset stage makes it of a row of NeMo Gym."""
    request = {"input": [{"role": "user", "content": question}], "tools": tools}
    source = {"responses_create_params": request, "id": 7, "initial_count": start, "expected_count": expected}
    return canonical_row(source, "prompts", {"nemo_gym": "responses_create_params"})


class ResourceServer:
    """Counters, and what was asked. A session is known by its cookie, which is another one after each answer."""

    def __init__(self) -> None:
        self.url = ""
        self.handlers: dict[str, Handler] = {}  # by path, in the place of its own
        self.asked: dict[str, list[tuple[str, Any]]] = defaultdict(list)  # by session: path and body
        self.at_once = self.most_at_once = 0
        self.slow = False
        self._counters: dict[str, int] = {}
        self._cookies: dict[str, str] = {}
        self._numbers = itertools.count()
        self._random = random.Random(0)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if path in self.handlers:
            return await self.handlers[path](request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.slow:
                await asyncio.sleep(self._random.uniform(0, 0.01))
            return await self._answer(path, request)
        finally:
            self.at_once -= 1

    async def _answer(self, path: str, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        cookie = request.cookies.get("session")
        if (cookie is None) != (path == "seed_session"):
            return web.json_response({"detail": "no session"}, status=400)
        session = f"s{next(self._numbers)}" if cookie is None else cookie.partition("|")[0]
        if cookie is not None and self._cookies[session] != cookie:
            return web.json_response({"detail": "an old cookie"}, status=400)
        self.asked[session].append((path, body))
        response = self._act(path, session, body)
        self._cookies[session] = f"{session}|{len(self.asked[session])}"
        response.set_cookie("session", self._cookies[session], path="/")
        return response

    def _act(self, path: str, session: str, body: Any) -> web.Response:
        match path:
            case "seed_session":
                self._counters[session] = body["initial_count"]
                return web.json_response({})
            case "add" if not isinstance(body.get("count"), int):
                return web.json_response({"detail": "count must be an integer"}, status=422)
            case "add":
                self._counters[session] += body["count"]
                return web.json_response({"success": True})
            case "count":
                return web.json_response({"count": self._counters[session]})
            case "verify":
                reward = float(self._counters[session] == body["expected_count"])
                return web.json_response({**body, "reward": reward, "accuracy": reward == 1})
        return web.json_response({"detail": "Not Found"}, status=404)


@contextmanager
def resource_server() -> Iterator[ResourceServer]:
    server = ResourceServer()
    with served("POST", "/{path}", server.answer) as server.url:
        yield server


@contextmanager
def served(method: str, path: str, handler: Handler) -> Iterator[str]:
    """The address of a server in a thread of this process, on the loopback interface."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        application = web.Application(client_max_size=2**25)
        application.router.add_route(method, path, handler)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
