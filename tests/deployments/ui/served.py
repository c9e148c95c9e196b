"""An application of aiohttp, served by a thread of the test's own process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def served(application: web.Application, listener: socket.socket) -> Iterator[None]:
    stop = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(application)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        await asyncio.to_thread(stop.wait)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
