"""`alignment plan` and `alignment run`: the dry run of a recipe, and its run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from deployments.cli.cluster_room import reservations, room_notes
from deployments.cli.console import console
from deployments.cli.made_models import model_lines
from deployments.cli.prefect_settings import import_prefect
from deployments.cli.reports import copy_report
from deployments.cli.tables import comparison_tables, estimate_table, outcome_table, plan_table
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import STORE_VARIABLE, open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StageError
from rlhf_core.pipeline.estimates import Known, estimates
from rlhf_core.pipeline.plan import PlannedNode
from rlhf_core.pipeline.plan import plan as make_plan
from rlhf_core.pipeline.prepare import Checked, Prepared, check, prepare
from rlhf_core.pipeline.record import RunRecord, read_record

app = typer.Typer()

RECIPE = typer.Argument(help="name of a shipped recipe, or path of a .yaml file")
OVERRIDES = typer.Argument(help="settings to change, each key.key=value, such as rl.steps=200", metavar="KEY=VALUE")


@app.command()
def plan(recipe: Annotated[str, RECIPE], overrides: Annotated[list[str] | None, OVERRIDES] = None) -> None:
    """Show the stages that `run` would reuse and compute, the reasons, and the cost. Starts nothing, writes nothing."""
    checked = check(recipe, overrides or [])
    repository: ArtifactRepository | None = None
    if os.environ.get(STORE_VARIABLE):
        store = open_store(store_url())
        store.reach()
        repository = ArtifactRepository(store)
    answers = [*checked.ask_servers(repository), *checked.call_functions(repository)]
    earlier: list[Manifest] = []
    planned = planned_nodes(checked, repository, earlier)
    console.print(plan_table(checked.loaded.recipe.name, planned))
    _show_estimates(checked, planned, earlier)
    for stage, why in checked.left_out.items():
        console.print(f"{stage} is left out: {why}", style="dim")
    for note in (*checked.notes, *answers):
        console.print(note)
    for note in _room_notes(checked, planned):
        console.print(note)


def planned_nodes(
    checked: Checked, repository: ArtifactRepository | None, earlier: list[Manifest] | None = None
) -> list[PlannedNode]:
    name = checked.loaded.recipe.name
    return make_plan(checked.graph, repository, recipe=name, results=earlier)


def _show_estimates(checked: Checked, planned: Sequence[PlannedNode], earlier: Sequence[Manifest]) -> None:
    finished = {node.name: node.manifest for node in planned if node.manifest is not None}
    facts = Known(checked.seen, checked.loaded.root, finished, earlier)
    informative = {name: estimate for name, estimate in estimates(checked.graph, facts).items() if estimate.has_values}
    if not informative:
        return
    console.print(estimate_table(informative))


def _room_notes(checked: Checked, planned: Sequence[PlannedNode]) -> list[str]:
    """Compare reservations with the cluster. Raises StageError if it has no room for a stage that must be computed."""
    return room_notes(reservations(checked.graph[node.name] for node in planned if node.action == "compute"))


@app.command()
def run(recipe: Annotated[str, RECIPE], overrides: Annotated[list[str] | None, OVERRIDES] = None) -> None:
    """Run a recipe and follow it. Finished stages are reused. Ctrl-C stops its jobs."""
    settings = overrides or []
    prepared = prepare(recipe, settings)
    prepared.require_single_run()
    planned = planned_nodes(prepared, prepared.repository)
    console.print(plan_table(prepared.loaded.recipe.name, planned))
    _room_notes(prepared, planned)

    import_prefect()
    from deployments.cli.following import follow  # Prefect takes a second to import, and `plan` does not need it

    parameters = {"recipe": absolute(recipe), "overrides": settings}
    ended = follow("alignment/full", parameters, [node.name for node in planned], console)
    record = read_record(prepared.store, ended.run_id)
    if record is not None:
        console.print(outcome_table(record))
    if not ended.succeeded:
        raise StageError(f"{ended.message} (run {ended.url})")
    if record is not None:
        _show_end(prepared, record, ended.url)


def absolute(recipe: str) -> str:
    """Make the path absolute: the flow runs in another folder than this command."""
    return str(Path(recipe).resolve()) if recipe.endswith((".yaml", ".yml")) else recipe


def _show_end(prepared: Prepared, record: RunRecord, url: str) -> None:
    for comparison in comparison_tables(record):
        console.print(comparison)
    if all(node.outcome == "reused" for node in record.nodes):
        console.print("Nothing had to be computed: every stage was in the store.")
    for what, shown in model_lines(prepared.graph):
        _show_place(what, shown)
    if any(node.ref.stage == Kind.REPORT for node in record.nodes):
        _show_place("report", str(copy_report(prepared.store, record.run_id)))
    _show_place("this run", url)
    _show_place("Ray dashboard", os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", ""))
    _show_place("artifacts", f"{prepared.store.url} (`alignment artifacts`)")


def _show_place(what: str, where: str) -> None:
    console.print(Text.assemble((f"{what:<14}", "bold"), f" {where}"), soft_wrap=True, highlight=False)
