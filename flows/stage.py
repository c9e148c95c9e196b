"""One stage of a recipe alone, on inputs that the store has."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.running import Row, run_recipe, stop_jobs


@flow(name="stage", on_cancellation=[stop_jobs])
def stage(
    node: Annotated[str, Field(description="which, as `alignment plan` names it: sft, rl, evaluation.rl …")],
    recipe: Annotated[str, Field(description="name of a shipped recipe, or path of a .yaml file")] = "tiny",
    overrides: Annotated[
        list[str], Field(description="settings to change, each key.key=value, such as rl.steps=200")
    ] = [],  # noqa: B006  Prefect shows the default in the form and copies it
) -> list[Row]:
    """Computes one stage, unless the store has its result. Returns its row of the table."""
    return run_recipe(recipe, overrides, only=[node])
