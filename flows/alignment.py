"""The whole alignment of a model: a recipe's stages as a DAG, each a Ray job, each result an artifact."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.running import Row, run_recipe, stop_jobs


@flow(name="alignment", on_cancellation=[stop_jobs])
def alignment(
    recipe: Annotated[str, Field(description="name of a shipped recipe, or path of a .yaml file")] = "tiny",
    overrides: Annotated[
        list[str], Field(description="settings to change, each key.key=value, such as rl.steps=200")
    ] = [],  # noqa: B006  Prefect shows the default in the form and copies it
) -> list[Row]:
    """Base, SFT, reward model, RL, merge, evaluation, report: what the recipe asks for and the store does not have.

    Returns one row per stage: its outcome, time and main figures.
    """
    return run_recipe(recipe, overrides)
