"""Pages of a store, and any application of aiohttp, served by a thread of the test's own process."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from deployments.ui.server import application
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.system.network import listening

TOKEN = "secret"


@contextmanager
def browsing(store: Store, cache: Path) -> Iterator[httpx.Client]:
    """A client that has the token of a server of the store's pages."""
    pages = Pages(StoreReader(ArtifactRepository(store), cache))
    with listening("127.0.0.1", 0) as listener, served(application(pages, TOKEN, frozenset({"127.0.0.1"})), listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, follow_redirects=True) as client:
            client.get(f"/?token={TOKEN}")
            yield client


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


def data_of(page: str, name: str) -> Any:
    """The first data of this name for a script of the page."""
    found = re.search(rf"data-{name}='([^']*)'", page)
    assert found is not None
    return json.loads(found[1])
