"""One stage of a recipe alone, on inputs from the store."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.notifications import notify_failure
from flows.parameters import NodeName, Overrides, RecipeName
from flows.running import Row, run_recipe, stop_jobs


@flow(name="stage", on_cancellation=[stop_jobs], on_failure=[notify_failure], on_crashed=[notify_failure])
def stage(
    node: NodeName,
    recipe: RecipeName = "tiny",
    overrides: Overrides = [],  # noqa: B006  Prefect copies it
) -> list[Row] | State[Any]:
    """Compute one stage, unless the store has its result. Returns its row of the table.

    Args:
        node: name in `alignment plan`: sft, rl, evaluation.rl …
        recipe: name of a shipped recipe, or path of a .yaml file
        overrides: settings to change, each key.key=value, such as rl.steps=200
    """
    return run_recipe(recipe, overrides, only=[node])
