"""`alignment cost`: what a run took and cost, by stage and attempt."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from deployments.cli.console import console
from deployments.cli.tables import cost_totals, duration
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import Cost, cost_of, total
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.run_costs import RunCosts, run_costs
from rlhf_core.recipe.prices import read_prices
from rlhf_core.report.formatting import hours, money

app = typer.Typer()


@app.command()
def cost(
    run: Annotated[str, typer.Argument(help="id of a run of a recipe, as the Prefect UI shows it")],
    prices: Annotated[Path | None, typer.Option(help="a YAML file with other prices than the run's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a run took and cost, by stage and attempt, and what reuse saved; also of one that runs."""
    costs = run_costs(ArtifactRepository(open_store(store_url())), run, None if prices is None else read_prices(prices))
    if as_json:
        console.print_json(json.dumps(_as_json(costs)))
        return
    console.print(_table(costs))
    for line in cost_totals(costs.stages, costs.prices):
        console.print(line, highlight=False)


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
        hours(cost.gib_seconds), _energy(cost), f"{cost.judge_tokens:,} tokens" if cost.judge_calls else "",
        money(cost, costs.prices),
    )  # fmt: skip


def _ended(attempt: Attempt) -> str:
    steps = "" if attempt.step is None else f", steps {attempt.resumed_after or 0} to {attempt.step}"
    return f"{attempt.outcome}{steps}" + (f": {attempt.reason}" if attempt.reason else "")


def _energy(cost: Cost) -> str:
    return ", ".join(f"{joules / 3.6e6:.3g} kWh {kind}" for kind, joules in cost.joules.items())


def _as_json(costs: RunCosts) -> dict[str, Any]:
    parts = ("own", "others", "saved")
    return {
        "recipe": costs.recipe,
        "currency": None if costs.prices is None else costs.prices.currency,
        "stages": [
            {
                "stage": stage.name,
                "outcome": stage.outcome,
                **{part: _plain(getattr(stage, part), costs) for part in parts},
                "attempts": [
                    {**attempt.model_dump(mode="json"), "cost": _plain(cost_of([attempt], costs.prices), costs)}
                    for attempt in stage.attempts
                ],
            }
            for stage in costs.stages
        ],
        "own": _plain(total(costs.stages, "own"), costs),
        "others": _plain(total(costs.stages, "others"), costs),
        "saved": _plain(total(costs.stages, "saved"), costs),
    }


def _plain(cost: Cost, costs: RunCosts) -> dict[str, Any]:
    return {
        **asdict(cost),
        "money": None if costs.prices is None else cost.money,
        "unpriced": sorted(cost.unpriced),
    }
