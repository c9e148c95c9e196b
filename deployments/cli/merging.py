"""`alignment merge`: a model of an adapter from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.documents.files import Files
from deployments.cli.output import Printed, printing
from deployments.cli.signals import end_in_order
from rlhf_core.system.paths import resolved

app = typer.Typer()

ADAPTER = typer.Argument(
    help="Adapter: a folder as saved by peft, stage/key (the first digits are enough), or an alias."
)
BASE = typer.Option(
    help="Model that the adapter was trained on: a folder, stage/key or an alias; defaults to the one that it names.",
    metavar="MODEL",
)
OUT = typer.Option("--out", "-o", help="New folder for the model; defaults to ./ADAPTER-merged.")


@printing(app, panels.MODELS)
def merge(
    adapter: Annotated[str, ADAPTER],
    base: Annotated[str | None, BASE] = None,
    out: Annotated[Path | None, OUT] = None,
) -> Printed[Files]:
    """Merge an adapter into its base, and write the model with full weights, exactly as a stage `merge` does.

    For example: alignment merge ./my-lora --base ./Llama-3.2-1B -o ./my-model
    """
    from rlhf_core.inference.merging import merge_into

    end_in_order()
    name = Path(adapter).name
    if name in ("", ".."):  # of the folder `.`, and of those above
        name = resolved(adapter).name
    folder = merge_into(adapter, base, out or Path(f"{name}-merged"))
    return Printed(Files([folder]), [str(folder)])
