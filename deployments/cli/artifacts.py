"""`alignment artifacts`, `show`, `pull`, `report`, `alias` and `lineage`: the content of the store and its lineage."""

from __future__ import annotations

from getpass import getuser
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from deployments.cli.console import console
from deployments.cli.made_models import MODELS
from deployments.cli.reports import copy_report
from deployments.cli.signals import end_in_order
from deployments.cli.tables import duration
from rlhf_core.artifacts.aliases import move_alias
from rlhf_core.artifacts.lineage import lineage as find_lineage
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError, shortened
from rlhf_core.report.formatting import main_metrics
from rlhf_core.system.paths import user_path
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.tracking.protocol import is_of_tracking

app = typer.Typer()

ARTIFACT = typer.Argument(help="stage/key as printed by `alignment artifacts`; the first digits of the key are enough")


def _repository() -> ArtifactRepository:
    return ArtifactRepository(open_store(store_url()))


@app.command()
def artifacts(stage: Annotated[str | None, typer.Option(help="only artifacts of this stage")] = None) -> None:
    """List the artifacts of the store, newest first."""
    table = Table()
    for column in ("artifact", "node", "kind", "made", "size", "metrics"):
        table.add_column(
            column, justify="right" if column == "size" else "left", overflow="fold", no_wrap=column == "artifact"
        )
    manifests = [m for m in _repository().list_artifacts() if stage is None or m.stage == stage]
    for m in sorted(manifests, key=lambda manifest: manifest.finished_at, reverse=True):
        finished_at = f"{m.finished_at:%Y-%m-%d %H:%M}"
        table.add_row(str(m.ref), m.name, m.kind, finished_at, _size(m), main_metrics(m.metrics))
    console.print(table)


@app.command()
def show(artifact: Annotated[str, ARTIFACT]) -> None:
    """Print an artifact's manifest: files, parents, settings, libraries, metrics."""
    console.print_json(_repository().find(artifact).model_dump_json())


@app.command()
def pull(
    artifact: Annotated[str, ARTIFACT],
    folder: Annotated[
        Path | None, typer.Argument(help="a folder that does not exist yet; default ./<stage>-<key>")
    ] = None,
    tracking: Annotated[
        bool, typer.Option("--tracking", help="with the metrics and trackers' files of a model")
    ] = False,
) -> None:
    """Copy an artifact's files into a folder and verify their hashes. For a model, only the model's own files."""
    repository = _repository()
    manifest = repository.find(artifact)
    ref = manifest.ref
    target = user_path(folder or f"{ref.stage}-{ref.key[:12]}")
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists already: give another folder")
    end_in_order()
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("pull", parent) as scratch:
        partial_folder = scratch / "made"
        partial_folder.mkdir()
        left_out = not tracking and manifest.kind in MODELS
        files = [file for file in manifest.files if not (left_out and is_of_tracking(file.path))]
        repository.get_folder({file.path: file.sha256 for file in files}, partial_folder)
        partial_folder.rename(target)
    console.print(f"{ref} → {target}", soft_wrap=True, highlight=False)


@app.command()
def alias(
    name: Annotated[str, typer.Argument(help="model/alias, such as support-bot/champion")],
    artifact: Annotated[str, ARTIFACT],
    reason: Annotated[str, typer.Option(help="kept with the alias")] = "",
) -> None:
    """Point an alias at an artifact, for recipes to start from: `{stage: artifact, ref: support-bot/champion}`."""
    repository = _repository()
    model, slash, short = name.partition("/")
    if not slash:
        raise StoreError(f"`{name}`: give the model's name too, such as support-bot/{name}")
    moved = move_alias(repository.store, model, short, repository.find(artifact).ref, by=getuser(), reason=reason)
    before = f", before {moved.previous}" if moved.previous is not None else ""
    console.print(f"{name} → {moved.manifest}{before}", soft_wrap=True, highlight=False)


@app.command()
def report(run: Annotated[str, typer.Argument(help="id of a run of a recipe, as the Prefect UI shows it")]) -> None:
    """Copy the report of a run to outputs/RUN/report.html, and print that path."""
    console.print(copy_report(open_store(store_url()), run), soft_wrap=True, highlight=False)


@app.command()
def lineage(artifact: Annotated[str, ARTIFACT]) -> None:
    """Draw the ancestors of an artifact, back to the first datasets, models and files."""
    repository = _repository()
    root = repository.find(artifact)
    nodes = find_lineage(repository, root.ref).nodes
    seen: set[ArtifactRef] = set()

    def grow(branch: Tree, manifest: Manifest) -> None:
        for path, sha256 in sorted(manifest.user_files.items()):
            branch.add(Text.assemble(("file ", "dim"), path, (f" {sha256[:12]}", "dim")))
        for url, identity in sorted(manifest.pins.items()):
            shown = shortened(identity, 60)  # a folder's lists its files
            branch.add(Text.assemble(("source ", "dim"), url, (f" {shown}", "dim")))
        for role, ref in sorted(manifest.parents.items()):
            repeated = ref in seen
            seen.add(ref)
            child = branch.add(_described(nodes[ref], role).append(" (as above)" if repeated else "", "dim"))
            if not repeated:
                grow(child, nodes[ref])

    tree = Tree(_described(root, ""))
    grow(tree, root)
    console.print(tree)


def _described(manifest: Manifest, role: str) -> Text:
    seconds = duration((manifest.finished_at - manifest.started_at).total_seconds())
    seed = "" if manifest.seed is None else f", seed {manifest.seed}"
    provenance = f" {manifest.kind}{seed}, code {manifest.code_revision[:12]}, {seconds} on {manifest.device}"
    prefix = f"{role}: " if role else ""
    return Text.assemble((prefix, "dim"), (manifest.name, "bold"), f" {manifest.ref}", (provenance, "dim"))


def _size(manifest: Manifest) -> str:
    size = float(sum(file.size for file in manifest.files))
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
