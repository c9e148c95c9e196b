"""`alignment export`: a model for others, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.artifacts import ARTIFACT
from deployments.cli.documents.files import Export
from deployments.cli.output import Printed, printing
from deployments.cli.signals import end_in_order
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError
from rlhf_core.system.scratch import scratch_folder

app = typer.Typer()

_HUB, _GGUF = "hub:", "gguf:"


@printing(app, panels.MODELS)
def export(
    model: Annotated[str, ARTIFACT],
    to: Annotated[
        str,
        typer.Option("--to", help="Target: a new folder, hub:owner/name, or gguf:FILE.", metavar="TARGET"),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base, and write full weights.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(help="Model on the hub that an adapter is loaded with.", metavar="OWNER/NAME")
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Licence, by its identifier on the hub, such as apache-2.0.", metavar="ID"),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository on the hub public.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything and print the card, but keep and upload nothing.")
    ] = False,
) -> Printed[Export]:
    """Write a model for transformers, with a card of its lineage, data, settings and evaluations.

    For example: alignment export support-bot/champion --to ./my-model
    """
    from rlhf_core.inference.exporting import Exported, build, export_folder, upload

    repository = ArtifactRepository(open_store(store_url()))
    what = Exported(model, merged=merge, base=base, licence=licence)
    if public and not to.startswith(_HUB):
        raise StoreError("--public is for a repository on the hub: remove it, or give --to hub:owner/name")
    end_in_order()
    if dry_run:
        with scratch_folder("export") as folder:
            card = (build(repository, what, folder) / "README.md").read_text(encoding="utf-8")
        return Printed(Export(None, card), [card])
    if to.startswith(_HUB):
        with scratch_folder("export") as folder:
            target = upload(build(repository, what, folder), to.removeprefix(_HUB), public=public)
    elif to.startswith(_GGUF):
        from rlhf_core.inference.gguf_export import export_gguf

        target = str(export_gguf(repository, what, Path(to.removeprefix(_GGUF))))
    else:
        target = str(export_folder(repository, what, Path(to)))
    return Printed(Export(target), [target])
