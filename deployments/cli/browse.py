"""`alignment browse`: a run in the terminal, from its stages to the tokens of its rollouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from deployments.cli import panels
from deployments.cli.completion import run_ids
from deployments.cli.console import console
from deployments.cli.documents.results import BrowsedRun, BrowsedStage
from deployments.cli.output import Printed, printing
from deployments.cli.signals import end_in_order
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository

if TYPE_CHECKING:
    from deployments.ui.reading import StoreReader
    from rlhf_core.pipeline.run_view import Run
    from rlhf_core.report.node_view import NodeView

app = typer.Typer()


@printing(app, panels.RESULTS)
def browse(
    run: Annotated[str, typer.Argument(help="ID of a run, as listed by `alignment runs`.", autocompletion=run_ids)],
) -> Printed[BrowsedRun]:
    """Browse a run in the terminal: stages, curves, rollouts token by token.

    `q` ends it. Where the output is no terminal, the stages are printed.
    """
    from deployments.ui.reading import StoreReader
    from rlhf_core.stages.job_context import node_cache

    end_in_order()
    reader = StoreReader(ArtifactRepository(open_store(store_url())), node_cache())
    found = reader.known_run(run)
    return Printed(_document(found, reader.nodes(found)), _text(reader, found))


def _text(reader: StoreReader, run: Run) -> Iterator[RenderableType]:
    """Browse on a terminal, and yield nothing; elsewhere yield the stages. Not called with `--json`."""
    from deployments.ui.terminal import browse_pages, page_table
    from deployments.ui.terminal_pages import run_page

    if console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
        browse_pages(console, partial(run_page, reader, run.run_id))
    else:
        page = run_page(reader, run.run_id)
        yield page_table(page, page.rows, [None] * len(page.columns))


def _document(run: Run, nodes: list[NodeView]) -> BrowsedRun:
    stages = [
        BrowsedStage(
            node.name, node.ref.full, node.state, node.seconds, node.manifest.metrics if node.manifest else {},
            node.error, node.holder,
        )
        for node in nodes
    ]  # fmt: skip
    return BrowsedRun(run.run_id, run.name, run.overrides, run.outcome, run.started_at, run.seconds, stages)
