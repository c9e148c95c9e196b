"""`alignment cost`: what a run took and cost, by stage and attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from deployments.cli import panels
from deployments.cli.completion import run_ids
from deployments.cli.documents.results import RunCost
from deployments.cli.output import Printed, printing
from deployments.cli.tables import cost_totals
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import Cost, cost_of
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.run_costs import RunCosts, run_costs
from rlhf_core.recipe.prices import read_prices
from rlhf_core.report.formatting import duration, energy, hours, money

app = typer.Typer()


@printing(app, panels.RESULTS)
def cost(
    run: Annotated[str, typer.Argument(help="ID of a run, as listed by `alignment runs`.", autocompletion=run_ids)],
    prices: Annotated[Path | None, typer.Option(help="YAML file with prices to use instead of the run's.")] = None,
) -> Printed[RunCost]:
    """Show the use and cost of a run by stage and attempt, and what reuse saved.

    The run need not have ended.
    """
    costs = run_costs(ArtifactRepository(open_store(store_url())), run, None if prices is None else read_prices(prices))
    return Printed(RunCost.of(run, costs), _text(costs))


def _text(costs: RunCosts) -> Iterator[RenderableType]:
    yield _table(costs)
    yield from cost_totals(costs.stages, costs.prices)


def _table(costs: RunCosts) -> Table:
    table = Table(title=f"{costs.recipe}: what its stages took", title_justify="left")
    for column in ("stage", "", "time", "GPU hours", "core hours", "GiB hours", "energy", "judges", "cost"):
        table.add_column(column, justify="left" if column in ("stage", "") else "right", overflow="fold")
    for stage in costs.stages:
        outcome = f"{stage.outcome}, saved" if stage.saved.seconds else stage.outcome
        _add(table, stage.name, outcome, stage.own + stage.others + stage.saved, costs)
        for attempt in stage.attempts if len(stage.attempts) > 1 or stage.outcome == "failed" else ():
            _add(
                table,
                f"  {attempt.started_at:%m-%d %H:%M:%S}",
                _ended(attempt),
                cost_of([attempt], costs.prices),
                costs,
            )
    return table


def _add(table: Table, name: str, outcome: str, cost: Cost, costs: RunCosts) -> None:
    table.add_row(
        name, outcome, duration(cost.seconds), hours(cost.gpu_seconds), hours(cost.core_seconds),
        hours(cost.gib_seconds), energy(cost.joules), f"{cost.judge_tokens:,} tokens" if cost.judge_calls else "",
        money(cost, costs.prices),
    )  # fmt: skip


def _ended(attempt: Attempt) -> str:
    steps = "" if attempt.step is None else f", from {attempt.resumed_after or 0} to {attempt.step}"
    return f"{attempt.outcome}{steps}" + (f": {attempt.reason}" if attempt.reason else "")
