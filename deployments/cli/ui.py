"""`alignment ui`: the runs, models and rollouts of the store in a browser."""

from __future__ import annotations

import secrets
import tempfile
from contextlib import ExitStack
from typing import Annotated

import typer
from aiohttp import web

from deployments.cli import panels
from deployments.cli.signals import end_in_order
from deployments.stack.settings import LOOPBACK
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository

app = typer.Typer()


@app.command(rich_help_panel=panels.RESULTS)
def ui(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8040,
    demo: Annotated[bool, typer.Option("--demo", help="Show a made-up store instead of yours.")] = False,
) -> None:
    """Serve the store to a browser until Ctrl-C: runs, curves, rollouts token by token, models."""
    from deployments.ui.demo import write_demo
    from deployments.ui.demo_run import write_demo_run
    from deployments.ui.pages import Pages
    from deployments.ui.reading import StoreReader
    from deployments.ui.server import application
    from rlhf_core.stages.job_context import node_cache
    from rlhf_core.system.network import listening

    end_in_order()
    with ExitStack() as stack:
        listener = stack.enter_context(listening(host, port))
        url = stack.enter_context(tempfile.TemporaryDirectory(prefix="alignment-demo-")) if demo else store_url()
        repository = ArtifactRepository(open_store(url))
        if demo:
            write_demo(repository)
            write_demo_run(repository)
        repository.store.reach()
        name = f"[{host}]" if ":" in host else host  # of the server, as browsers send it
        token = secrets.token_urlsafe(32)
        served = application(Pages(StoreReader(repository, node_cache())), token, hosts=frozenset({name, "localhost"}))
        typer.echo(f"store    {'made up' if demo else repository.store.url}")
        typer.echo(f"open     http://{name}:{port}/?token={token}")
        web.run_app(served, sock=listener, access_log=None, print=None)
