"""`alignment try`: one stage in this process, for debugging."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.console import console
from deployments.cli.documents.runs import TriedStage
from deployments.cli.exit_codes import ExitCode
from deployments.cli.output import Printed, printing
from deployments.cli.quiet import quiet_libraries
from deployments.cli.reports import OUTPUTS
from deployments.cli.run import OVERRIDES, RECIPE
from deployments.cli.signals import end_in_order
from rlhf_core.errors import AlignmentError
from rlhf_core.pipeline.in_process import Tried, try_node
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.report.formatting import main_metrics
from rlhf_core.system.terminal import lent_terminal

app = typer.Typer()

NODE = typer.Argument(help="Node of the graph, as named by `alignment plan`: sft, evaluation.rl, data.prompts.")
STORE = typer.Option(help="Store of inputs and results, a folder or s3:// URL; that of a run has all of its results.")
AGAIN = typer.Option("--again", help="Recompute the inputs of the node, too.")


@printing(app, panels.RUNS, "try")
def try_stage(
    recipe: Annotated[str, RECIPE],
    node: Annotated[str, NODE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    store: Annotated[str, STORE] = str(OUTPUTS / "try"),
    again: Annotated[bool, AGAIN] = False,
) -> Printed[TriedStage]:
    """Run one node in this process, without Ray, Prefect or a server, so that `breakpoint()` works in all code.

    The node's inputs come from the store, or are computed here first, all with one rank and one engine. The output of
    vLLM is printed after an error, or if VLLM_LOGGING_LEVEL is set.
    """
    quiet_libraries()
    # Debugging must not upload: the trackers' files stay in the result.
    for variable in ("SWANLAB_MODE", "WANDB_MODE"):
        os.environ.setdefault(variable, "offline")
    place = store if "://" in store else str(Path(store).absolute())
    prepared = prepare(recipe, overrides or [], store=place, call_functions=False)  # the node calls them itself
    chosen = prepared.node(node)
    end_in_order()
    try:
        with lent_terminal():
            tried = try_node(prepared, chosen, console.print, again=again)
    except AlignmentError as error:  # raised by the stage: a debugging session needs the traceback
        traceback.print_exception(error)
        raise typer.Exit(ExitCode.ERROR) from error
    kept = tried.kept.finished_at if tried.kept is not None and tried.kept != tried.manifest else None
    manifest = tried.manifest
    return Printed(
        TriedStage(manifest.ref.full, tried.folder, manifest.metrics, kept), _lines(tried, kept, prepared.store.url)
    )


def _lines(tried: Tried, kept: datetime | None, store: str) -> Iterator[str]:
    yield f"artifact {tried.manifest.ref}, for other commands with ALIGNMENT_STORE={store}"
    yield f"result   {tried.folder}"
    if metrics := main_metrics(tried.manifest.metrics):
        yield f"metrics  {metrics}"
    if kept is not None:
        yield (
            f"{store} keeps the result of {kept:%Y-%m-%d %H:%M}, which other nodes read; to continue from this one "
            "give another --store"
        )
