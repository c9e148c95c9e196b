"""`alignment gc`: delete what no alias, run, loop or job needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from deployments.cli import panels
from deployments.cli.console import console
from deployments.cli.documents.store import Garbage, Objects
from deployments.cli.output import Printed, printing
from deployments.cli.signals import end_in_order
from deployments.cli.tables import size_text
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.garbage.collection import Amount, GarbageCollection, Plan
from rlhf_core.garbage.keep import BLOBS, CHECKPOINTS, Keep, described, parse_keep, time_to_live
from tasks.followers import live_runs

app = typer.Typer()

_WHY_KEPT = {
    "alias": "an alias points there or did once, or a move or decision is based on it",
    "loop": "a round of a loop started from it, made it or used it",
    "run": "a run used or made it",
    "job": "a job computes it now",
    "lineage": "something kept was made from it",
    "--keep": "it is younger than --keep says",
}
_NONE = "nothing may go"


@printing(app, panels.STORE, "gc")
def gc_command(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the objects, instead of only listing them.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="KIND=TIME",
            help="Time to keep what nothing needs, such as rollouts=7d; runs=90d is the time that a run needs it.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print for each artifact why it is kept, too.")] = False,
) -> Printed[Garbage]:
    """List the objects that no alias, run, loop or job needs, and delete them with --delete.

    They are artifacts that nothing needs, checkpoints of stages that did not end, and bytes that no artifact has. Other
    objects in the bucket stay. Runs may go on meanwhile.
    """
    times = parse_keep(keep or ())
    store = open_store(store_url())
    collection = GarbageCollection(store, times, partial(live_runs, store))
    with console.status("reading what is needed"):
        plan = collection.plan()
    text: list[RenderableType] = [_reasons(plan)] if verbose else []
    text.append(_table("kept", plan.kept, _WHY_KEPT))
    text.append(_table("may go", plan.going, {kind: _why(kind, times) for kind in plan.going}) if plan.going else _NONE)
    done: Amount | None = None
    if delete:
        end_in_order()
        with console.status("deleting") as status:
            done = collection.delete(
                plan, lambda count, num_bytes: status.update(f"deleted {count}, {size_text(num_bytes)}")
            )
        text.append(f"deleted {done.count} objects, {size_text(done.num_bytes)}")
    elif plan.going:
        text.append("nothing was deleted; `--delete` deletes what may go")
    kept, going = ({name: _objects(amount) for name, amount in each.items()} for each in (plan.kept, plan.going))
    return Printed(Garbage(kept, going, None if done is None else _objects(done)), text)


def _objects(amount: Amount) -> Objects:
    return Objects(amount.count, amount.num_bytes)


def _table(title: str, amounts: Mapping[str, Amount], why: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "number", "size", "why"):
        table.add_column(column, justify="right" if column in ("number", "size") else "left", overflow="fold")
    for name, amount in sorted(amounts.items(), key=lambda item: -item[1].num_bytes):
        table.add_row(name, str(amount.count), size_text(amount.num_bytes), why[name])
    total = sum(amount.num_bytes for amount in amounts.values())
    table.add_row("together", str(sum(amount.count for amount in amounts.values())), size_text(total), "", style="bold")
    return table


def _why(kind: str, times: Keep) -> str:
    time = described(time_to_live(times, kind))
    if kind == CHECKPOINTS:
        return f"of stages that ended, or that nothing was written to for {time}"
    if kind == BLOBS:
        return f"no artifact has these bytes, and they are older than {time}"
    return f"no alias, run, loop or job needs them, and they are older than {time}"


def _reasons(plan: Plan) -> Table:
    table = Table(title="why each artifact is kept", title_justify="left")
    for column in ("artifact", "kept by"):
        table.add_column(column, overflow="fold", no_wrap=column == "artifact")
    for ref in sorted(plan.needs.folders.keys() & plan.needs.reasons.keys(), key=str):
        table.add_row(str(ref), plan.needs.reasons[ref].detail)
    return table
