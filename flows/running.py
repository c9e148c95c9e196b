"""Common part of the flows: the nodes of a recipe as Prefect tasks, concurrent unless they depend on each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.states import Cancelled

from flows.cancellation import noticed_cancellation
from flows.earlier_attempts import close_earlier_attempts
from flows.gates import settle
from flows.names import name_run, run_name
from flows.notifications import notify
from flows.report_link import link_report
from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.errors import NothingLeftError, RecipeError, StageError
from rlhf_core.graph.graph import Node
from rlhf_core.graph.rerun import Rerun
from rlhf_core.pipeline.budget import BudgetWatch, require_budget
from rlhf_core.pipeline.prepare import Prepared, pins_path, prepare
from rlhf_core.pipeline.record import (
    NodeRecord,
    Outcome,
    RunRecord,
    RunStart,
    read_start,
    write_needs,
    write_record,
    write_start,
)
from rlhf_core.pipeline.specs import run_settings
from rlhf_core.report.formatting import main_metrics
from tasks.prefect_tasks import StageRunner, stage_task
from tasks.ray_jobs import connect
from tasks.run_progress import RunProgress
from tasks.stage import StageResult, stop_jobs_of

Row = dict[str, str]
Futures = Mapping[str, PrefectFuture[Any]]
CANCELLED: State[Any] = Cancelled(message="cancelled; its jobs are stopped, except those that other runs follow")


def run_recipe(
    recipe: str,
    overrides: Sequence[str],
    only: Collection[str] | None = None,
    rerun_from: str = "",
    budget: float | None = None,
    tags: Collection[str] = (),
) -> list[Row] | State[Any]:
    """Compute the recipe's nodes, or the nodes `only`, that the store does not have, until they cost more than the
    budget.

    rerun_from: a node to compute again, `node@label`; without a label this run is the label, also of its retries.
    tags: of the run; in Prefect it has those of its recipe too.
    Returns one table row per node, or the state Cancelled or OverBudget. Raises RecipeError, StoreError or StackError
    before any job, StageError when a stage failed.
    """
    started_at = datetime.now(UTC)
    run_id = str(runtime.flow_run.id)
    with noticed_cancellation(UUID(run_id)) as cancel:
        close_earlier_attempts(UUID(run_id))
        rerun = Rerun.parse(rerun_from, label=run_id) if rerun_from else None
        prepared = prepare(recipe, overrides, pins=pins_path(run_id), rerun=rerun)
        if only is None:
            prepared.require_single_run()
        nodes = prepared.graph if only is None else _chosen(only, prepared)
        watch = None
        if budget is not None:
            watch = BudgetWatch(prepared.repository, budget, require_budget(prepared, nodes, budget))
        name = run_name(prepared.loaded.recipe, overrides, only, rerun_from)
        name_run(UUID(run_id), name, prepared.loaded.recipe, tags)
        futures = compute(prepared, overrides, started_at, nodes, cancel, watch, tags)
    if cancel.is_set():
        write_stopped(prepared, overrides, started_at, nodes, futures, rerun, tags)
    if watch is not None and watch.overrun:
        notify(
            "over_budget", watch.overrun, prepared.loaded.recipe.notify,
            recipe=prepared.loaded.recipe.name, store=prepared.store, run_id=run_id, say=get_run_logger().warning,
        )  # fmt: skip
        return Cancelled(name="OverBudget", message=watch.overrun)
    if cancel.is_set():
        return CANCELLED
    return conclude(prepared, overrides, started_at, nodes, futures, rerun, tags)


def compute(
    prepared: Prepared,
    overrides: Sequence[str],
    started_at: datetime,
    nodes: Mapping[str, Node],
    cancel: threading.Event,
    watch: BudgetWatch | None = None,
    tags: Collection[str] = (),
) -> Futures:
    """Run the nodes to their end, or until `cancel` is set, which `watch` does over the budget.

    Stores what it is about to compute, for followers and for its cost.
    """
    start = _start(prepared, overrides, started_at, nodes, tags)
    write_start(prepared.store, start)
    settings = run_settings(prepared, str(runtime.flow_run.id))
    write_needs(prepared.store, settings.run_id, [node.ref for node in prepared.graph.values()])
    stuck = partial(_notify_stuck, prepared, settings.run_id, get_run_logger().warning)
    runner = StageRunner(settings, nodes, prepared.repository, connect(), cancel, RunProgress(nodes), stuck)
    with nullcontext() if watch is None else watch.watching(start, cancel.set):
        futures = _submit(nodes, runner)
        try:
            for future in futures.values():
                future.wait()
        except (KeyboardInterrupt, TerminationSignal):
            # An interrupted or cancelled run: its tasks see this, stop their jobs, and the task runner waits for them.
            cancel.set()
            raise
    return futures


def conclude(
    prepared: Prepared,
    overrides: Sequence[str],
    started_at: datetime,
    nodes: Mapping[str, Node],
    futures: Futures,
    rerun: Rerun | None = None,
    tags: Collection[str] = (),
) -> list[Row]:
    """Write the run's record, table and report. Returns one table row per node.

    Raises StageError if one failed, NothingLeftError if only stages failed that had no rows to make.
    """
    record = _record(prepared, overrides, started_at, nodes, futures, rerun, tags)
    write_record(prepared.store, record)
    rows = [_row(node) for node in record.nodes]
    create_table_artifact(
        rows, key="stages", description=f"Run {record.run_id} of the recipe {prepared.loaded.recipe.name}"
    )
    settle(prepared, nodes, record.run_id)
    _raise_failures(futures)
    link_report(prepared, record)
    return rows


def write_stopped(
    prepared: Prepared,
    overrides: Sequence[str],
    started_at: datetime,
    nodes: Mapping[str, Node],
    futures: Futures,
    rerun: Rerun | None = None,
    tags: Collection[str] = (),
) -> None:
    """Write the record of a run that was cancelled, or stopped over its budget, with what its stages took."""
    record = _record(prepared, overrides, started_at, nodes, futures, rerun, tags)
    write_record(prepared.store, record.model_copy(update={"stopped": True}))


def stop_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Stop the jobs of a cancelled run whose process could not, as a cancellation hook. A no-op if it could."""
    stop_jobs_of(str(flow_run.id), open_store(store_url()), connect())


def _chosen(names: Collection[str], prepared: Prepared) -> dict[str, Node]:
    """Return the nodes `names`. Raises RecipeError for an unknown one, or one whose inputs the store does not have."""
    graph = prepared.graph
    chosen = {prepared.node(name).name for name in names}
    nodes = {name: node for name, node in graph.items() if name in chosen}
    for node in nodes.values():
        for other in (*node.inputs.values(), *node.after):
            if other not in names and prepared.repository.manifest(graph[other].ref) is None:
                raise RecipeError(
                    f"{node.name} needs {other}, which is not in the store: run `alignment/full`, or {other} first"
                )
    return nodes


def _notify_stuck(prepared: Prepared, run_id: str, say: Callable[[str], None], reason: str) -> None:
    recipe = prepared.loaded.recipe
    notify("stuck", reason, recipe.notify, recipe=recipe.name, store=prepared.store, run_id=run_id, say=say)


def _submit(nodes: Mapping[str, Node], runner: StageRunner) -> Futures:
    futures: dict[str, PrefectFuture[Any]] = {}
    for name, node in nodes.items():
        before = [futures[other] for other in (*node.inputs.values(), *node.after) if other in futures]
        futures[name] = stage_task(node.stage.name).submit(
            node_name=name, runner=runner, return_state=False, wait_for=before
        )
    return futures


def _start(
    prepared: Prepared,
    overrides: Sequence[str],
    started_at: datetime,
    nodes: Mapping[str, Node],
    tags: Collection[str],
) -> RunStart:
    """Return what the run is about to compute. What its first attempt computed is not reused in a retry of it."""
    run_id = str(runtime.flow_run.id)
    earlier = read_start(prepared.store, run_id)

    def is_reused(name: str, node: Node) -> bool:
        if earlier is not None and earlier.nodes.get(name) == node.ref:  # else of another round of a loop
            return name in earlier.reused
        return prepared.repository.manifest(node.ref) is not None

    return RunStart(
        run_id=run_id,
        recipe=prepared.loaded.recipe.model_dump(mode="json"),
        overrides=tuple(overrides),
        started_at=started_at,
        nodes={name: node.ref for name, node in nodes.items()},
        tags=tuple(tags),
        reused=tuple(name for name, node in nodes.items() if is_reused(name, node)),
    )


def _record(
    prepared: Prepared,
    overrides: Sequence[str],
    started_at: datetime,
    nodes: Mapping[str, Node],
    futures: Futures,
    rerun: Rerun | None,
    tags: Collection[str],
) -> RunRecord:
    return RunRecord(
        run_id=str(runtime.flow_run.id),
        recipe=prepared.loaded.recipe.model_dump(mode="json"),
        overrides=tuple(overrides),
        tags=tuple(tags),
        rerun_from="" if rerun is None else str(rerun),
        started_at=started_at,
        finished_at=datetime.now(UTC),
        nodes=tuple(_node_record(node, futures[name].state, prepared) for name, node in nodes.items()),
    )


def _node_record(node: Node, state: State[StageResult], prepared: Prepared) -> NodeRecord:
    attempts = attempts_at(prepared.store, node.ref, prepared.repository.stored_manifest(node.ref))
    if not state.is_completed():
        error = _failure(state)
        outcome: Outcome = "failed" if error else "not run"
        return NodeRecord(name=node.name, ref=node.ref, outcome=outcome, error=error, attempts=tuple(attempts))
    result = state.result()
    return NodeRecord(
        name=node.name,
        ref=node.ref,
        outcome="reused" if result.reused else "computed",
        seconds=result.seconds,
        metrics=result.manifest.metrics,
        attempts=tuple(attempts),
    )


def _failure(state: State[StageResult]) -> str:
    """Return the last error line of a failed stage; empty for one that only waited for it."""
    if state.is_completed() or state.is_pending():
        return ""
    return str(state.result(raise_on_failure=False)) if state.is_failed() else state.message or str(state.name)


def _raise_failures(futures: Futures) -> None:
    failed = [(error, future.state) for future in futures.values() if (error := _failure(future.state))]
    for error, _ in failed:
        get_run_logger().error("%s", error)
    if failed:
        raised = [state.result(raise_on_failure=False) for _, state in failed]
        kind = NothingLeftError if all(isinstance(each, NothingLeftError) for each in raised) else StageError
        raise kind("; ".join(error for error, _ in failed))


def _row(node: NodeRecord) -> Row:
    return {
        "stage": node.name,
        "outcome": node.outcome,
        "time": f"{node.seconds:.1f} s",
        "metrics": node.error or main_metrics(node.metrics),
        "artifact": str(node.ref),
    }
