"""Environments of verifiers, which a file's `load_environment` returns, played as agents.

They need the package, in a version whose `Environment.rollout` takes a client of `openai`: 0.1.9.post3 was run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from rlhf_core.errors import RecipeError

_COLUMNS = ("prompt", "answer", "info", "task")  # of a row, which an environment reads


def without_monitor() -> None:
    """Keep progress bars, which environments show while they load, from starting a thread that forks would not have."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0


def player(load: Callable[..., Any], options: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """Return an agent that plays an episode in the environment, which is loaded once.

    Raises RecipeError if `load` returns no environment that scores one episode.
    """
    from openai import AsyncOpenAI  # imported once, before episodes fork

    environment = load(**options)
    score = getattr(getattr(environment, "rubric", None), "score_rollout", None)
    if score is None or not hasattr(environment, "rollout"):
        raise RecipeError(
            f"{name} returned {type(environment).__name__}, expected an environment of verifiers with `rollout` and a "
            "rubric: those of verifiers.v1 are tasks and harnesses, which are not played here"
        )
    unlimited = {"score_sem": nullcontext()} if "score_sem" in inspect.signature(score).parameters else {}

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        question = {"example_id": 0, **{column: row[column] for column in _COLUMNS if column in row}}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
            state = await environment.rollout(question, client, "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        await score(state, **unlimited)
        return {"reward": state["reward"], "metrics": state.get("metrics") or {}}

    return play
