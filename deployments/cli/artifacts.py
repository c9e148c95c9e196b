"""`alignment artifacts`, `show`, `pull`, `report` and `lineage`: the content of the store and its lineage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.json import JSON
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from deployments.cli import panels
from deployments.cli.completion import artifact_names, run_ids
from deployments.cli.console import table_or
from deployments.cli.documents.files import Files
from deployments.cli.documents.results import Ancestors, ArtifactLine, Artifacts, ParentLink, Pulled
from deployments.cli.made_models import MODELS
from deployments.cli.output import Printed, printing
from deployments.cli.reports import copy_report
from deployments.cli.signals import end_in_order
from deployments.cli.tables import size_text
from rlhf_core.artifacts.lineage import lineage as find_lineage
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError, one_line, shortened
from rlhf_core.report.formatting import duration, main_metrics
from rlhf_core.system.paths import user_path
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.tracking.protocol import is_of_tracking

app = typer.Typer()

ARTIFACT = typer.Argument(
    help="Artifact, as stage/key (the first digits are enough) or an alias; listed by `alignment artifacts`.",
    autocompletion=artifact_names,
)


def _repository() -> ArtifactRepository:
    return ArtifactRepository(open_store(store_url()))


@printing(app, panels.RESULTS)
def artifacts(
    stage: Annotated[str | None, typer.Option(help="List only artifacts of this stage.")] = None,
) -> Printed[Artifacts]:
    """List the artifacts of the store, newest first."""
    table = Table()
    for column in ("artifact", "node", "kind", "made", "size", "metrics"):
        table.add_column(
            column, justify="right" if column == "size" else "left", overflow="fold", no_wrap=column == "artifact"
        )
    manifests = [m for m in _repository().list_artifacts() if stage is None or m.stage == stage]
    manifests.sort(key=lambda manifest: manifest.finished_at, reverse=True)
    lines = [ArtifactLine.of(manifest) for manifest in manifests]
    for m, line in zip(manifests, lines, strict=True):
        made = f"{line.made:%Y-%m-%d %H:%M}"
        table.add_row(str(m.ref), m.name, m.kind, made, size_text(line.size), main_metrics(m.metrics))
    of_stage = "" if stage is None else f" of the stage `{one_line(stage)}`"
    none = f"the store has no artifact{of_stage} yet: `alignment run RECIPE` makes some"
    return Printed(Artifacts(lines), [table_or(table, none)])


@printing(app, panels.RESULTS)
def show(artifact: Annotated[str, ARTIFACT]) -> Printed[Manifest]:
    """Print an artifact's manifest: files, parents, settings, libraries, metrics."""
    manifest = _repository().find(artifact)
    return Printed(manifest, [JSON(manifest.model_dump_json())])


@printing(app, panels.RESULTS)
def pull(
    artifact: Annotated[str, ARTIFACT],
    folder: Annotated[Path | None, typer.Argument(help="New folder for the files; it defaults to ./STAGE-KEY.")] = None,
    tracking: Annotated[
        bool, typer.Option("--tracking", help="Include the metrics and trackers' files of a model.")
    ] = False,
) -> Printed[Pulled]:
    """Copy an artifact's files into a folder and verify their hashes.

    Of a model, only its own files are copied.
    """
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
    return Printed(Pulled(ref.full, target), [f"{ref} → {target}"])


@printing(app, panels.RESULTS)
def report(
    run: Annotated[str, typer.Argument(help="ID of a run, as listed by `alignment runs`.", autocompletion=run_ids)],
) -> Printed[Files]:
    """Copy the report of a run to outputs/RUN/report.html, with its content as JSON beside it."""
    paths = copy_report(open_store(store_url()), run)
    return Printed(Files(paths), [str(paths[0])])


@printing(app, panels.RESULTS)
def lineage(artifact: Annotated[str, ARTIFACT]) -> Printed[Ancestors]:
    """Draw the ancestors of an artifact, back to the first datasets, models and files."""
    repository = _repository()
    root = repository.find(artifact)
    found = find_lineage(repository, root.ref)
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
            child = branch.add(_described(found.nodes[ref], role).append(" (as above)" if repeated else "", "dim"))
            if not repeated:
                grow(child, found.nodes[ref])

    tree = Tree(_described(root, ""))
    grow(tree, root)
    edges = [ParentLink(edge.parent.full, edge.child.full, edge.role) for edge in found.edges]
    return Printed(Ancestors(list(found.nodes.values()), edges), [tree])


def _described(manifest: Manifest, role: str) -> Text:
    seconds = duration((manifest.finished_at - manifest.started_at).total_seconds())
    seed = "" if manifest.seed is None else f", seed {manifest.seed}"
    provenance = f" {manifest.kind}{seed}, code {manifest.code_revision[:12]}, {seconds} on {manifest.device}"
    prefix = f"{role}: " if role else ""
    return Text.assemble((prefix, "dim"), (manifest.name, "bold"), f" {manifest.ref}", (provenance, "dim"))
