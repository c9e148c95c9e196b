"""`alignment loop`, `rounds` and `schedule`: rounds of a loop, run now or on a schedule, and their results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deployments.cli.console import console
from deployments.cli.prefect_settings import import_prefect
from deployments.cli.reports import copy_page
from deployments.cli.run import OVERRIDES, RECIPE, absolute, planned_nodes
from deployments.cli.tables import plan_table
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.pipeline.prepare import prepare, require_loop
from rlhf_core.recipe.loading import load_recipe

app = typer.Typer()


@app.command()
def loop(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    rounds: Annotated[int, typer.Option(min=1, help="how many, one after the other")] = 1,
) -> None:
    """Run rounds of a loop and follow them. A round that has not ended is finished first. Ctrl-C stops its jobs."""
    settings = overrides or []
    prepared = prepare(recipe, settings)
    prepared.require_loop()
    planned = planned_nodes(prepared, prepared.repository)
    console.print(plan_table(prepared.loaded.recipe.name, planned))

    import_prefect()
    from deployments.cli.following import follow  # Prefect takes a second to import, and `rounds` does not need it

    parameters = {"recipe": absolute(recipe), "overrides": settings, "rounds": rounds}
    ended = follow("iterative-dpo/rounds", parameters, [node.name for node in planned], console)
    finished_rounds = Rounds(prepared.store, prepared.loaded.recipe.name)
    console.print(_table(finished_rounds, ended.run_id))
    if not ended.succeeded or ended.state == "Skipped":
        raise StageError(f"{ended.message} (run {ended.url})")


@app.command()
def rounds(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    skip: Annotated[
        str | None, typer.Option(help="end the round that has not ended, for this reason; its prompts count as used")
    ] = None,
) -> None:
    """List the rounds of a loop, with the verdict on each candidate, and the reason."""
    loaded = load_recipe(recipe, overrides or [])
    require_loop(loaded.recipe)
    store, name = open_store(store_url()), loaded.recipe.name
    stored_rounds = Rounds(store, name)
    if skip is not None:
        console.print(f"round {stored_rounds.skip(skip).number} is skipped")
    console.print(_table(stored_rounds))
    copied = copy_page(store, stored_rounds.page_path, Path(name) / "rounds.html")
    if copied is not None:
        console.print(copied, soft_wrap=True, highlight=False)


def _table(stored_rounds: Rounds, run_id: str | None = None) -> Table:
    """Return the table of all rounds, or of those that the run has finished."""
    table = Table()
    for column in ("round", "verdict", "why", "candidate", "ended"):
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for end in stored_rounds.ends():
        if run_id in (None, end.run_id):
            candidate = "" if end.candidate is None else str(end.candidate)
            ended = f"{end.ended_at:%Y-%m-%d %H:%M}"
            table.add_row(str(end.number), end.verdict, end.reason, candidate, ended)
    return table


@app.command()
def schedule(
    recipe: Annotated[str | None, typer.Argument(help="a recipe with a `loop`; none: list the schedules")] = None,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    cron: Annotated[str, typer.Option(help="when to run a round, such as '0 3 * * *': each night at 3")] = "",
    every: Annotated[float, typer.Option(min=0, help="or: minutes between two rounds' starts")] = 0,
    timezone: Annotated[str, typer.Option(help="of the cron expression, such as Europe/Berlin")] = "UTC",
    off: Annotated[bool, typer.Option("--off", help="remove the loop's schedule; a running round is finished")] = False,
) -> None:
    """Run one round of a loop at a time, on a schedule; a second call for the same loop replaces it."""
    import_prefect()
    from deployments.cli.scheduling import Schedule, remove_schedule, require_a_loop, schedules, set_schedule

    if recipe is None:
        require_a_loop(off=off, cron=cron, every=every, overrides=overrides or [])
    elif off:
        if cron or every:
            raise RecipeError(f"--off removes the schedule, and --{'cron' if cron else 'every'} sets it: give one")
        remove_schedule(recipe, overrides or [])
    else:
        settings = overrides or []
        prepared = prepare(recipe, settings)
        prepared.require_loop()
        set_schedule(Schedule(prepared.loaded.recipe.name, absolute(recipe), tuple(settings), cron, every, timezone))
    table = Table()
    for column in ("loop", "when", "active", "recipe", "settings"):
        table.add_column(column, overflow="fold")
    for scheduled in schedules():
        table.add_row(*scheduled)
    console.print(table)
