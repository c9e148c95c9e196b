"""`alignment runs` and `recipes`: the runs of the store, newest first, and the recipes that can be run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from deployments.cli import panels
from deployments.cli.console import table_or
from deployments.cli.documents.results import RunLine, Runs
from deployments.cli.documents.runs import RecipeLine, Recipes
from deployments.cli.output import Printed, printing
from deployments.cli.prefect_settings import import_prefect
from deployments.cli.recipe_list import described_recipes
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.errors import IntegrityError, StackError
from rlhf_core.pipeline.record import newest_records
from rlhf_core.report.formatting import amount, duration

app = typer.Typer()

_FAILED = ("failed", "crashed", "unreadable")
_STYLES = {"completed": "green", "running": "cyan", **dict.fromkeys(_FAILED, "red")}


@printing(app, panels.RESULTS)
def runs(
    recipe: Annotated[str | None, typer.Option(help="List only runs of the recipe of this name.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="List only runs that failed or crashed.")] = False,
    tag: Annotated[str | None, typer.Option(help="List only runs with this tag.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of runs to list.")] = 20,
) -> Printed[Runs]:
    """List runs, newest first.

    Runs that have ended come from the store, all others from Prefect.
    """

    def wanted(line: RunLine) -> bool:
        of_recipe = recipe in (None, line.recipe)
        return of_recipe and (not failed or line.outcome in _FAILED) and (tag is None or tag in line.tags)

    recorded = list(islice(filter(wanted, _recorded()), limit))
    known = {line.run for line in recorded}
    others = [line for line in _in_prefect(limit) if line.run not in known and wanted(line)]
    lines = sorted([*others, *recorded], key=_newest_first, reverse=True)[:limit]
    filtered = failed or recipe is not None or tag is not None
    none = "no run matches these filters" if filtered else "there is no run yet: `alignment run RECIPE` makes one"
    return Printed(Runs(lines), [table_or(_table(lines), none)])


def _recorded() -> Iterator[RunLine]:
    for run_id, record in newest_records(open_store(store_url())):
        if isinstance(record, IntegrityError):
            yield RunLine(run_id, "", (), "unreadable", None, None, [])
        else:
            yield RunLine.of(record)


def _in_prefect(limit: int) -> list[RunLine]:
    """Return the newest runs that Prefect knows, ended or not; none without a server."""
    if not os.environ.get("PREFECT_API_URL"):
        return []
    import_prefect()
    from deployments.cli.prefect_runs import newest_runs

    try:
        return newest_runs(limit)
    except StackError as error:
        print(f"only runs that have ended are listed: {error}", file=sys.stderr)
        return []


def _newest_first(line: RunLine) -> tuple[float, str]:
    return (line.started.timestamp() if line.started is not None else 0.0, line.run)


def _table(lines: list[RunLine]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    least = {
        "run": 36,
        "recipe": 6,
        "settings\ntags": 8,
        "started": 10,
        "outcome": 9,
        "time\ncost": 5,
    }  # 80 characters in all
    for column, width in least.items():
        table.add_column(column, overflow="fold", no_wrap=column == "run", min_width=width)
    for line in lines:
        outcome = f"{line.outcome}: {', '.join(line.failed_stages)}" if line.failed_stages else line.outcome
        table.add_row(
            line.run,
            line.recipe,
            Text("\n".join(filter(None, [" ".join(line.settings), *line.tags]))),
            "" if line.started is None else f"{line.started:%Y-%m-%d %H:%M}",
            Text(outcome, _STYLES.get(line.outcome, "")),
            "\n".join(_time_and_cost(line)),
        )
    return table


def _time_and_cost(line: RunLine) -> Iterator[str]:
    if line.seconds is not None:
        yield duration(line.seconds)
    if line.money is not None:
        yield f"{amount(line.money)} {line.currency}"


@printing(app, panels.RUNS)
def recipes() -> Printed[Recipes]:
    """List the recipes of this folder and the shipped ones, each with its description."""
    lines = [RecipeLine(each.name, each.path, each.description) for each in described_recipes()]
    table = Table("recipe", "description")
    for line in lines:
        table.add_row(line.name, line.description)
    return Printed(Recipes(lines), [table])
