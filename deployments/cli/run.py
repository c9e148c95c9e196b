"""`alignment plan` and `alignment run`: the dry run of a recipe, and its run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from deployments.cli import panels
from deployments.cli.cluster_room import reservations, room_notes
from deployments.cli.completion import recipe_names
from deployments.cli.console import console
from deployments.cli.documents.runs import Plan, PlannedStage, RunEnd, StageOutcome
from deployments.cli.exit_codes import RunFailedError, RunInterruptedError
from deployments.cli.made_models import model_lines
from deployments.cli.output import Printed, printing
from deployments.cli.prefect_settings import import_prefect
from deployments.cli.reports import copy_report
from deployments.cli.tables import comparison_tables, cost_totals, estimate_table, outcome_table, plan_table
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import STORE_VARIABLE, open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.texts import check_tag
from rlhf_core.errors import StageError
from rlhf_core.graph.rerun import Rerun
from rlhf_core.pipeline.budget import expected_money, in_words, known_facts, require_budget
from rlhf_core.pipeline.estimates import estimates
from rlhf_core.pipeline.plan import PlannedNode
from rlhf_core.pipeline.plan import plan as make_plan
from rlhf_core.pipeline.prepare import Checked, Prepared, check, prepare
from rlhf_core.pipeline.record import RunRecord, read_record
from rlhf_core.recipe.prices import prices_of

if TYPE_CHECKING:
    from deployments.cli.following import Ended

app = typer.Typer()

RECIPE = typer.Argument(help="Name of a shipped recipe, or path of a .yaml file.", autocompletion=recipe_names)
OVERRIDES = typer.Argument(help="Settings to change, each as key.key=value, such as rl.steps=200.", metavar="KEY=VALUE")
RERUN_FROM = typer.Option(
    help="Recompute this node and every node that depends on it; NODE@LABEL names the repetition.",
    metavar="NODE",
)


def _tag(text: str) -> str:
    try:
        return check_tag(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@printing(app, panels.RUNS)
def plan(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    rerun_from: Annotated[str | None, RERUN_FROM] = None,
) -> Printed[Plan]:
    """Show which stages `run` would reuse and which it would compute, why, and at what cost.

    Nothing is started or written.
    """
    rerun = _rerun(rerun_from)
    checked = check(recipe, overrides or [], rerun=rerun)
    repository: ArtifactRepository | None = None
    if os.environ.get(STORE_VARIABLE):
        store = open_store(store_url())
        store.reach()
        repository = ArtifactRepository(store)
    tried = checked.try_out(repository)
    earlier: list[Manifest] = []
    planned = planned_nodes(checked, repository, earlier)
    prices = prices_of(checked.loaded.recipe)
    known = estimates(checked.graph, known_facts(checked, planned, earlier, prices, repository))
    costs = {name: estimate for name, estimate in known.items() if estimate.has_values}
    notes = [*checked.notes, *tried]
    if rerun is not None:
        notes.append(f"these keys are those of `--rerun-from {rerun}`: with this name a run finds them again")
    text: list[RenderableType] = [plan_table(checked.loaded.recipe.name, planned)]
    if costs:
        text.append(estimate_table(costs, prices))
    if costs and prices is not None:
        text.append(in_words(expected_money(known), prices.currency))
    text += [Text(f"{stage} is left out: {why}", "dim") for stage, why in checked.left_out.items()]
    stages = [
        PlannedStage(node.name, node.ref.full, node.action, node.why, node.reads, costs.get(node.name))
        for node in planned
    ]
    currency = None if prices is None else prices.currency
    printed = partial(Plan, checked.loaded.recipe.name, stages, checked.left_out, currency)
    try:
        notes += _room_notes(checked, planned)
    except StageError as error:  # the plan is shown all the same
        return Printed(printed(notes), [*text, *notes], error)
    return Printed(printed(notes), [*text, *notes])


def planned_nodes(
    checked: Checked, repository: ArtifactRepository | None, earlier: list[Manifest] | None = None
) -> list[PlannedNode]:
    name = checked.loaded.recipe.name
    return make_plan(checked.graph, repository, recipe=name, results=earlier)


def _room_notes(checked: Checked, planned: Sequence[PlannedNode]) -> list[str]:
    """Compare reservations with the cluster. Raises StageError if it has no room for a stage that must be computed."""
    return room_notes(reservations(checked.graph[node.name] for node in planned if node.action == "compute"))


def _rerun(text: str | None) -> Rerun | None:
    """Return the repetition, with a label of its own if the user gave none."""
    return None if text is None else Rerun.parse(text, label=uuid.uuid4().hex[:8])


@printing(app, panels.RUNS)
def run(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    rerun_from: Annotated[str | None, RERUN_FROM] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Maximum cost of the run; beyond it, the run stops at a checkpoint.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(parser=_tag, metavar="TAG", help="Tag of the run, to filter by.")
    ] = None,
) -> Printed[RunEnd]:
    """Run a recipe and follow it to its end.

    Finished stages are reused. Ctrl-C stops the run and its jobs.
    """
    settings, rerun = overrides or [], _rerun(rerun_from)
    prepared = prepare(recipe, settings, rerun=rerun)
    prepared.require_single_run()
    if budget is not None:
        require_budget(prepared, prepared.graph, budget)
    planned = planned_nodes(prepared, prepared.repository)
    console.print(plan_table(prepared.loaded.recipe.name, planned))
    _room_notes(prepared, planned)

    import_prefect()
    from deployments.cli.following import follow  # Prefect takes a second to import, and `plan` does not need it

    parameters: dict[str, Any] = {"recipe": absolute(recipe), "overrides": settings}
    if rerun is not None:
        parameters["rerun_from"] = str(rerun)
    if budget is not None:
        parameters["budget"] = budget
    if tag:
        parameters["tags"] = tag
    ended = follow("alignment/full", parameters, [node.name for node in planned], console)
    record = read_record(prepared.store, ended.run_id)
    report = None
    if ended.succeeded and record is not None and any(node.ref.stage == Kind.REPORT for node in record.nodes):
        report = copy_report(prepared.store, record.run_id)[0]
    stages = [StageOutcome.of(node) for node in record.nodes] if record is not None else []
    document = RunEnd(ended.run_id, ended.state, ended.succeeded, ended.message, ended.url, report, stages)
    text: list[RenderableType] = []
    if record is not None:
        prices = prices_of(prepared.loaded.recipe)
        text += [outcome_table(record, prices), *cost_totals(record.costs(prices), prices)]
    if ended.succeeded and record is not None:
        text += _end(prepared, record, ended.url, report)
    return Printed(document, text, run_error(ended))


def run_error(ended: Ended) -> RunFailedError | RunInterruptedError | None:
    """Return the error with which the command that followed the run ends; None: it succeeded."""
    if ended.succeeded:
        return None
    kind = RunInterruptedError if ended.interrupted else RunFailedError
    return kind(f"{ended.message} (run {ended.url})")


def absolute(recipe: str) -> str:
    """Make the path absolute: the flow runs in another folder than this command."""
    return str(Path(recipe).resolve()) if recipe.endswith((".yaml", ".yml")) else recipe


def _end(prepared: Prepared, record: RunRecord, url: str, report: Path | None) -> Iterator[RenderableType]:
    yield from comparison_tables(record)
    if all(node.outcome == "reused" for node in record.nodes):
        yield "Nothing had to be computed: every stage was in the store."
    for what, shown in model_lines(prepared.graph):
        yield _place(what, shown)
    if report is not None:
        yield _place("report", str(report))
    yield _place("this run", url)
    yield _place("Ray dashboard", os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", ""))
    yield _place("artifacts", f"{prepared.store.url} (`alignment artifacts`)")


def _place(what: str, where: str) -> Text:
    return Text.assemble((f"{what:<14}", "bold"), f" {where}")
