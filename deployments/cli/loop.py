"""`alignment loop`, `rounds` and `schedule`: rounds of a loop, run now or on a schedule, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deployments.cli import panels
from deployments.cli.console import console, table_or
from deployments.cli.documents.loops import LoopRounds, RoundLine, ScheduleLine, Schedules
from deployments.cli.exit_codes import RunFailedError
from deployments.cli.output import Printed, printing
from deployments.cli.prefect_settings import import_prefect
from deployments.cli.reports import copy_page
from deployments.cli.run import OVERRIDES, RECIPE, absolute, planned_nodes, run_error
from deployments.cli.tables import plan_table
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.budget import round_over_budget
from rlhf_core.pipeline.prepare import prepare, require_loop
from rlhf_core.pipeline.round_costs import loop_attempts
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.report.formatting import amount

app = typer.Typer()

_NO_ROUND = "there is no round yet: `alignment loop RECIPE` runs one"
_NO_SCHEDULE = "no loop has a schedule: `alignment schedule RECIPE --cron '0 3 * * *'` sets one"
BUDGET = typer.Option(min=0, help="Maximum cost of all rounds together; a round that would exceed it is not started.")


@printing(app, panels.RUNS)
def loop(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to run, one after another.")] = 1,
    budget: Annotated[float | None, BUDGET] = None,
) -> Printed[LoopRounds]:
    """Run rounds of a loop and follow them.

    An unfinished round is finished first. Ctrl-C stops the run and its jobs.
    """
    settings = overrides or []
    prepared = prepare(recipe, settings)
    prepared.require_loop()
    name = prepared.loaded.recipe.name
    if budget is not None:
        attempts = loop_attempts(prepared.repository, Rounds(prepared.store, name))
        if over := round_over_budget(prepared, attempts, budget):
            raise RecipeError(over)
    planned = planned_nodes(prepared, prepared.repository)
    console.print(plan_table(name, planned))

    import_prefect()
    from deployments.cli.following import follow  # Prefect takes a second to import, and `rounds` does not need it

    parameters = {"recipe": absolute(recipe), "overrides": settings, "rounds": rounds}
    if budget is not None:
        parameters["budget"] = budget
    ended = follow("iterative-dpo/rounds", parameters, [node.name for node in planned], console)
    finished_rounds = [line for line in _lines(Rounds(prepared.store, name)) if line.run == ended.run_id]
    error = run_error(ended)
    if ended.state == "Skipped":
        error = RunFailedError(f"{ended.message} (run {ended.url})")
    return Printed(LoopRounds(name, finished_rounds, None), [_table(finished_rounds)], error)


@printing(app, panels.RUNS)
def rounds(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    skip: Annotated[
        str | None, typer.Option(help="End the unfinished round for this reason; its prompts count as used.")
    ] = None,
) -> Printed[LoopRounds]:
    """List the rounds of a loop, each with the verdict on its candidate and the reason."""
    loaded = load_recipe(recipe, overrides or [])
    require_loop(loaded.recipe)
    store, name = open_store(store_url()), loaded.recipe.name
    stored_rounds = Rounds(store, name)
    if skip is not None:
        console.print(f"round {stored_rounds.skip(skip).number} is skipped")
    lines = list(_lines(stored_rounds))
    copied = copy_page(store, stored_rounds.page_path, Path(name) / "rounds.html")
    return Printed(
        LoopRounds(name, lines, copied),
        [table_or(_table(lines), _NO_ROUND), *([] if copied is None else [str(copied)])],
    )


def _lines(stored_rounds: Rounds) -> Iterator[RoundLine]:
    """Yield the rounds that have ended, and the one that has not."""
    for end in stored_rounds.ends():
        start = stored_rounds.start_of(end.number)
        yield RoundLine(
            end.number, end.verdict, end.reason, None if end.candidate is None else end.candidate.full,
            None if start is None else start.started_at, end.ended_at, end.run_id,
        )  # fmt: skip
    if (start := stored_rounds.unfinished()) is not None:
        verdict, reason = "unfinished", "its run has ended; the next one finishes it"
        if holder := stored_rounds.holder():
            verdict, reason = "running", f"since {start.started_at:%Y-%m-%d %H:%M}, {holder}"
        yield RoundLine(start.number, verdict, reason, None, start.started_at, None, start.run_id)


def _table(lines: Sequence[RoundLine]) -> Table:
    table = Table()
    for column in ("round", "verdict", "why", "candidate", "ended"):
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for line in lines:
        stage, _, key = (line.candidate or "").partition("/")
        candidate = f"{stage}/{key[:12]}" if key else ""
        ended = "" if line.ended is None else f"{line.ended:%Y-%m-%d %H:%M}"
        table.add_row(str(line.number), line.verdict, line.reason, candidate, ended)
    return table


@printing(app, panels.RUNS)
def schedule(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe with a `loop`; without one, the schedules are listed.")
    ] = None,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    cron: Annotated[str, typer.Option(help="Cron expression, such as '0 3 * * *' for each night at 3.")] = "",
    every: Annotated[
        float, typer.Option(min=0, help="Minutes between the starts of two rounds, instead of --cron.")
    ] = 0,
    timezone: Annotated[str, typer.Option(help="Time zone of the cron expression, such as Europe/Berlin.")] = "UTC",
    budget: Annotated[float | None, BUDGET] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Remove the schedule of the loop; a running round is finished.")
    ] = False,
) -> Printed[Schedules]:
    """Run rounds of a loop on a schedule, one at a time.

    A second call for the same loop replaces its schedule. Without a recipe, the schedules are listed.
    """
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
        set_schedule(
            Schedule(prepared.loaded.recipe.name, absolute(recipe), tuple(settings), cron, every, timezone, budget)
        )
    table = Table()
    for column in ("loop", "when", "active", "recipe", "settings", "budget"):
        table.add_column(column, overflow="fold")
    scheduled_loops = schedules()
    for scheduled in scheduled_loops:
        table.add_row(*scheduled[:-1], "" if scheduled.budget is None else amount(scheduled.budget))
    lines = [
        ScheduleLine(each.loop, each.when, each.active == "yes", each.recipe, each.overrides, each.budget)
        for each in scheduled_loops
    ]
    return Printed(Schedules(lines), [table_or(table, _NO_SCHEDULE)])
