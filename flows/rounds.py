"""Rounds of a loop, one after another, each to its verdict. graph/round_drafting.py has the stages of a round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from flows.cancellation import noticed_cancellation
from flows.earlier_attempts import close_earlier_attempts
from flows.names import name_run, run_name
from flows.notifications import notify
from flows.running import CANCELLED, Row, compute, conclude, write_stopped
from rlhf_core.artifacts.leases import Holder
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.rounds import RoundEnd, Rounds, RoundStart
from rlhf_core.artifacts.store import Store
from rlhf_core.config.notify import Event
from rlhf_core.errors import NothingLeftError, StageError
from rlhf_core.graph.round_drafting import PROMPTS, ROUND
from rlhf_core.pipeline.budget import round_over_budget
from rlhf_core.pipeline.prepare import Prepared, prepare, require_loop
from rlhf_core.pipeline.round_costs import loop_attempts
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.report.rounds import page


def run_rounds(
    recipe: str, overrides: Sequence[str], rounds: int, budget: float | None = None
) -> list[Row] | State[Any]:
    """Run until this flow run has finished `rounds` rounds, those of its earlier attempts included.

    budget: money that the whole loop may cost; a round that is expected to pass it is not started.
    Returns a row per round, or the state Skipped, Cancelled or OverBudget.
    Raises RecipeError, StoreError or StackError before any job, StageError when a stage failed: the round stays as it
    is, and the next run finishes it; but one whose completions leave nothing to train on is skipped.
    """
    run_id = str(runtime.flow_run.id)
    loaded = load_recipe(recipe, overrides)
    require_loop(loaded.recipe)
    loop = Rounds(open_store(store_url()), loaded.recipe.name)
    with noticed_cancellation(UUID(run_id)) as cancel:
        close_earlier_attempts(UUID(run_id))
        taken = loop.take()
        if isinstance(taken, Holder):
            return Completed(
                name="Skipped",
                message=f"round {loop.current().number} is at work, in process {taken.pid} on {taken.host}: one at a "
                "time",
            )
        with taken.start(on_loss=cancel.set) as lease:
            while len(ended := [end for end in loop.ends() if end.run_id == run_id]) < rounds:
                over = _run_round(loop, recipe, overrides, run_id, cancel, budget)
                lease.check()
                if over:
                    return Cancelled(name="OverBudget", message=over)
                if cancel.is_set():
                    return CANCELLED
    return [_row(end) for end in ended]


def _run_round(
    loop: Rounds, recipe: str, overrides: Sequence[str], run_id: str, cancel: threading.Event, budget: float | None
) -> str:
    """Run a round to its verdict, or until `cancel` is set. Returns why it was not started; empty if it was."""
    started_at = datetime.now(UTC)
    start = loop.current(run_id)
    prepared = prepare(recipe, overrides, pins=loop.pins_path(start.number), start=start)
    settings, say = prepared.loaded.recipe, get_run_logger().warning
    name_run(UUID(run_id), f"round {start.number} of {run_name(settings, overrides)}", settings)
    if budget is not None:
        over = round_over_budget(prepared, loop_attempts(prepared.repository, loop), budget)
        if over:
            notify(
                "over_budget", over, settings.notify, recipe=settings.name, store=prepared.store, run_id=run_id, say=say
            )
            return over
    nodes = dict.fromkeys([*start.nodes, *(node.ref for node in prepared.graph.values())])
    start = start.model_copy(update={"prompts": prepared.graph[PROMPTS].ref, "nodes": tuple(nodes)})
    loop.start(start)
    futures = compute(prepared, overrides, started_at, prepared.graph, cancel)
    if cancel.is_set():
        write_stopped(prepared, overrides, started_at, prepared.graph, futures)
        return ""
    try:
        conclude(prepared, overrides, started_at, prepared.graph, futures)
    except NothingLeftError as error:  # however often it is run: the next round has other prompts
        end = loop.give_up(start, str(error), run_id)
    else:
        end = _end(loop, prepared, start, run_id)
    get_run_logger().info("round %d: %s: %s", end.number, end.verdict, end.reason)
    notify_verdict(end, settings, prepared.store, run_id, say)
    ends, title = loop.ends(), f"The rounds of {settings.name}"
    create_table_artifact([_row(each) for each in ends], key="rounds", description=title)
    prepared.store.put(loop.page_path, page(prepared.repository, title, ends).encode())
    return ""


def notify_verdict(end: RoundEnd, recipe: Recipe, store: Store, run_id: str, say: Callable[[str], None]) -> None:
    """Notify of a candidate that was promoted or refused; a round without one is no event."""
    events: Mapping[str, Event] = {"accepted": "promoted", "refused": "refused"}
    if end.verdict in events:
        text = f"round {end.number}: {end.reason}"
        notify(events[end.verdict], text, recipe.notify, recipe=recipe.name, store=store, run_id=run_id, say=say)


def _end(loop: Rounds, prepared: Prepared, start: RoundStart, run_id: str) -> RoundEnd:
    """Store the verdict of the round's gate, after moving the alias: a kill in between is repaired by the next run."""
    node = prepared.graph[ROUND]
    record = prepared.repository.manifest(node.ref)
    if record is None:
        raise StageError(f"{node.ref} is gone from the store: run again")
    candidate, reason = node.input_refs["candidate"], str(record.metrics["reason"])
    accepted = record.metrics["accepted"] == 1
    moved_by_others = loop.accept(start, candidate, reason, node.ref) if accepted else ""
    end = RoundEnd(
        number=start.number,
        verdict="accepted" if accepted and not moved_by_others else "refused",
        reason=moved_by_others or reason,
        record=node.ref,
        candidate=candidate,
        prompts=node.input_refs["prompts"],
        ended_at=datetime.now(UTC),
        run_id=run_id,
        attempts=tuple(loop.attempts(start)),
    )
    loop.end(end)
    return end


def _row(end: RoundEnd) -> Row:
    return {
        "round": str(end.number),
        "verdict": end.verdict,
        "reason": end.reason,
        "candidate": "" if end.candidate is None else str(end.candidate),
        "ended": f"{end.ended_at:%Y-%m-%d %H:%M}",
    }
