"""Alignment of a model from end to end: a recipe's stages as a DAG, each a Ray job, each result an artifact."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.running import Row, run_recipe, stop_jobs


@flow(name="alignment", on_cancellation=[stop_jobs])
def alignment(recipe: str = "tiny", overrides: list[str] = []) -> list[Row] | State[Any]:  # noqa: B006  Prefect copies it
    """Compute base, SFT, reward model, RL, merge, evaluation, report: the recipe's stages that the store does not have.

    Returns one row per stage: its outcome, time and main metrics.

    Args:
        recipe: name of a shipped recipe, or path of a .yaml file
        overrides: settings to change, each key.key=value, such as rl.steps=200
    """
    return run_recipe(recipe, overrides)
