"""`alignment serve` and `serve-reward`: a model, or a reward model, behind HTTP."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.sampling import Base, Model, Precision, Rollout, Template
from deployments.cli.signals import end_in_order
from deployments.stack.settings import LOOPBACK
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.base import Dtype
from rlhf_core.inference.model_server import Address, running_server, served_model
from rlhf_core.inference.models import chat_tokenizer, found_folder, named_models, require_whole, whole_model
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.reward_server.processes import reward_application, serve
from rlhf_core.reward_server.settings import Serving, require_reward_model
from rlhf_core.system.network import listening
from rlhf_core.system.variables import value_of

app = typer.Typer()

TOKEN_VARIABLE = "ALIGNMENT_SERVE_TOKEN"  # noqa: S105  # the name of it

MODEL = typer.Argument(help="Reward model: a folder, stage/key (the first digits are enough), or an alias.")
WORKERS = typer.Option(min=1, max=256, help="Processes, each with the whole model; one that dies is restarted.")


@app.command("serve-reward", rich_help_panel=panels.MODELS)
def serve_reward(
    model: Annotated[str, MODEL],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8010,
    workers: Annotated[int, WORKERS] = 1,
    dtype: Annotated[Dtype | None, typer.Option(help="Precision; defaults to that of the weights.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not normalise by the stored mean and deviation.")] = False,
    tokens_per_batch: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Maximum tokens of one forward pass.")
    ] = 16384,
    max_texts: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum texts of one request.")] = 4096,
    max_mib: Annotated[int, typer.Option(min=1, max=65536, help="Maximum size of one request, in MiB.")] = 64,
) -> None:
    """Serve the rewards of a reward model until Ctrl-C: POST /score, POST /get_reward (OpenRLHF's form), GET /health.

    Requests need a token: that of the environment variable ALIGNMENT_SERVE_TOKEN, or else a new one, which is printed.
    """
    token, shown = _token()
    with listening(host, port) as listener:
        folder, manifest = found_folder(model, {Kind.REWARD_MODEL}, "reward model")
        require_reward_model(folder, normalize=not raw)
        if manifest is None:
            require_whole(model, folder, reward_model=True)
        key = manifest.key if manifest is not None else None
        serving = Serving(
            folder, model, token, dtype or stored_dtype(folder), max(1, (os.cpu_count() or 1) // workers), key,
            normalize=not raw, tokens_per_batch=tokens_per_batch, max_texts=max_texts, max_bytes=max_mib * 2**20,
        )  # fmt: skip
        typer.echo(f"url      {Address(host, port).url}/score")
        typer.echo(f"header   Authorization: Bearer {shown}")
        serve(partial(reward_application, serving), listener, workers)


@app.command("serve", rich_help_panel=panels.MODELS)
def serve_model(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    base: Base = None,
    chat_template: Template = None,
    dtype: Precision = None,
    rollout: Rollout = None,
) -> None:
    """Serve a model until Ctrl-C by vLLM's server of the OpenAI API, below /v1; GET /health checks it.

    Requests need a token: that of the environment variable ALIGNMENT_SERVE_TOKEN, or else a new one, which is printed.
    For example: alignment serve support-bot/champion --port 8001 --rollout max_length=8192
    """
    end_in_order()
    token, shown = _token()
    address = Address(host, port)
    address.listener().close()  # it is free
    (named,) = named_models([model], base)
    with whole_model(named) as folder:
        tokenizer = chat_tokenizer(model, folder, chat_template)
        served = served_model(model, folder, tokenizer, dtype, rollout or [], token=token)
        typer.echo(f"url      {address.url}/v1")
        typer.echo(f"model    {model}")
        typer.echo(f"header   Authorization: Bearer {shown}")
        typer.echo(f"loading {model}", err=True)
        with running_server(served, address) as server:
            server.show_output()
            typer.echo("it answers; Ctrl-C ends it", err=True)
            with suppress(KeyboardInterrupt):
                server.wait()


def _token() -> tuple[str, str]:
    """Return the token of a server, and its display. Raises VariableError if no header could have it."""
    if token := (value_of(TOKEN_VARIABLE) or "").strip():
        return token, f"${TOKEN_VARIABLE}"
    token = secrets.token_urlsafe(32)
    return token, token
