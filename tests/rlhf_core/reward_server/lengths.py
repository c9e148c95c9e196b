"""A reward server without a model, which starts at once.

Usage: `python -m tests.rlhf_core.reward_server.lengths PORT [never]`
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.synchronize import Semaphore

from aiohttp import web

from rlhf_core.reward_server.processes import serve
from rlhf_core.system.network import listening

SEMAPHORE = web.AppKey("semaphore", Semaphore)


def lengths() -> web.Application:
    """The reward of a completion is its length."""
    app = web.Application()
    app[SEMAPHORE] = multiprocessing.get_context("spawn").Semaphore()  # as libraries have them

    async def score(request: web.Request) -> web.Response:
        return web.json_response({"rewards": [float(len(text)) for text in (await request.json())["completions"]]})

    app.router.add_post("/score", score)
    return app


def never() -> web.Application:
    """It would load for hours."""
    print("loads", flush=True)
    time.sleep(10_000)
    raise AssertionError


if __name__ == "__main__":
    from tests.rlhf_core.reward_server import lengths as module

    with listening("127.0.0.1", int(sys.argv[1])) as address:
        serve(module.never if "never" in sys.argv else module.lengths, address, workers=2 - ("never" not in sys.argv))
