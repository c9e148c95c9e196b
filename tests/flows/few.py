"""A flow over a few quick nodes of a recipe, through the same code as the shipped flows."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.notifications import notify_failure
from flows.running import Row, run_recipe, stop_jobs


@flow(name="few", on_cancellation=[stop_jobs], on_failure=[notify_failure], on_crashed=[notify_failure])
def few(
    recipe: str,
    nodes: list[str],
    overrides: list[str] = [],  # noqa: B006  Prefect copies it
    budget: float | None = None,
    tags: list[str] = [],  # noqa: B006
) -> list[Row] | State[Any]:
    return run_recipe(recipe, overrides, only=nodes, budget=budget, tags=tags)
