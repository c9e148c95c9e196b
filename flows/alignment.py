"""Alignment of a model from end to end: a recipe's stages as a DAG, each a Ray job, each result an artifact."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.notifications import notify_failure
from flows.parameters import Budget, Overrides, RecipeName, RerunFrom, Tags
from flows.running import Row, run_recipe, stop_jobs


@flow(name="alignment", on_cancellation=[stop_jobs], on_failure=[notify_failure], on_crashed=[notify_failure])
def alignment(
    recipe: RecipeName = "tiny",
    overrides: Overrides = [],  # noqa: B006  Prefect copies it
    rerun_from: RerunFrom = "",
    budget: Budget = None,
    tags: Tags = [],  # noqa: B006
) -> list[Row] | State[Any]:
    """Compute base, SFT, reward model, RL, merge, evaluation, report: the recipe's stages that the store does not have.

    Returns one row per stage: its outcome, time and main metrics.

    Args:
        recipe: name of a shipped recipe, or path of a .yaml file; one with a `loop` is for `iterative-dpo/rounds`
        overrides: settings to change, each key.key=value, such as rl.steps=200
        rerun_from: a node that is computed again on purpose, and after it all that reads it; NODE@LABEL names the
            repetition, so that another run with the same name finds its results
        budget: money that the run may cost, in the currency of `prices`; it stops at a checkpoint once it costs more
        tags: further tags of the run, to filter by; it has the recipe's name and its RL algorithms anyway
    """
    return run_recipe(recipe, overrides, rerun_from=rerun_from, budget=budget, tags=tags)
