"""`alignment serve-reward`: a reward model behind HTTP."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from deployments.stack.settings import LOOPBACK
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.base import Dtype
from rlhf_core.errors import StoreError
from rlhf_core.models.folder import stored_dtype
from rlhf_core.serving.processes import RewardApplication, serve
from rlhf_core.serving.settings import Serving, require_reward_model
from rlhf_core.stages.job_context import node_cache

app = typer.Typer()

TOKEN_VARIABLE = "ALIGNMENT_SERVE_TOKEN"  # noqa: S105  # the name of it

MODEL = typer.Argument(help="a reward model: a folder, stage/key (the first digits are enough), or an alias")
WORKERS = typer.Option(min=1, help="processes, each with the whole model; one that dies is started again")


@app.command("serve-reward")
def serve_reward(
    model: Annotated[str, MODEL],
    host: Annotated[str, typer.Option(help="address to listen on")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8010,
    workers: Annotated[int, WORKERS] = 1,
    dtype: Annotated[Dtype | None, typer.Option(help="precision; by default that of the weights")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="do not normalise by the stored mean and deviation")] = False,
    tokens_per_batch: Annotated[int, typer.Option(min=1, help="tokens of one forward")] = 16384,
    max_texts: Annotated[int, typer.Option(min=1, help="texts of one request")] = 4096,
    max_mib: Annotated[int, typer.Option(min=1, help="size of one request")] = 64,
) -> None:
    """Serves the rewards of a reward model until Ctrl-C: POST /score, POST /get_reward (OpenRLHF's form), GET /health.

    Requests need a token: that of the environment variable ALIGNMENT_SERVE_TOKEN, or one that is made and printed.
    """
    folder, key = _found(model)
    require_reward_model(folder, normalize=not raw)
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    token = given or secrets.token_urlsafe(32)
    serving = Serving(
        folder, model, token, dtype or stored_dtype(folder), max(1, (os.cpu_count() or 1) // workers), key,
        normalize=not raw, tokens_per_batch=tokens_per_batch, max_texts=max_texts, max_bytes=max_mib * 2**20,
    )  # fmt: skip
    typer.echo(f"url      http://{f'[{host}]' if ':' in host else host}:{port}/score")
    typer.echo(f"header   Authorization: Bearer {f'${TOKEN_VARIABLE}' if given else token}")
    serve(RewardApplication(serving), host, port, workers)


def _found(model: str) -> tuple[Path, str | None]:
    """The folder, and of an artifact its key."""
    if (Path(model) / "config.json").is_file():
        return Path(model).absolute(), None
    repository = ArtifactRepository(open_store(store_url()))
    manifest = repository.find(model)
    if manifest.kind != Kind.REWARD_MODEL:
        raise StoreError(f"{manifest.ref} is a {manifest.kind}, not a reward model")
    return repository.fetch(manifest.ref, node_cache()), manifest.key
