"""A reward server without a model, which starts at once: `python -m tests.rlhf_core.serving.lengths PORT`."""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI

from rlhf_core.serving.processes import serve


def lengths() -> FastAPI:
    """The reward of a completion is its length."""
    app = FastAPI()

    @app.post("/score")
    async def score(request: dict[str, list[Any]]) -> dict[str, list[float]]:
        return {"rewards": [float(len(completion)) for completion in request["completions"]]}

    return app


if __name__ == "__main__":
    from tests.rlhf_core.serving import lengths as module

    serve(module.lengths, "127.0.0.1", int(sys.argv[1]), workers=1)
