"""A reward server without a model, which starts at once.

Usage: `python -m tests.rlhf_core.reward_server.lengths PORT [never]`
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

from fastapi import FastAPI

from rlhf_core.reward_server.processes import listening, serve


def lengths() -> FastAPI:
    """The reward of a completion is its length."""
    app = FastAPI()
    app.state.semaphore = multiprocessing.get_context("spawn").Semaphore()  # as libraries have them

    @app.post("/score")
    async def score(request: dict[str, list[Any]]) -> dict[str, list[float]]:
        return {"rewards": [float(len(completion)) for completion in request["completions"]]}

    return app


def never() -> FastAPI:
    """It would load for hours."""
    print("loads", flush=True)
    time.sleep(10_000)
    raise AssertionError


if __name__ == "__main__":
    from tests.rlhf_core.reward_server import lengths as module

    with listening("127.0.0.1", int(sys.argv[1])) as address:
        serve(module.never if "never" in sys.argv else module.lengths, address, workers=2 - ("never" not in sys.argv))
