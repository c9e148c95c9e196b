"""`alignment verify` and `repair`: integrity of the store's bytes, and its restoration."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from deployments.cli import panels
from deployments.cli.completion import artifact_names
from deployments.cli.console import console
from deployments.cli.documents.store import DamagedObject, Integrity
from deployments.cli.output import Printed, printing
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import is_path
from rlhf_core.artifacts.verification import MISSING, Damage, Verification, repair, verify
from rlhf_core.errors import IntegrityError, StoreError
from rlhf_core.pipeline.record import RunRecord, read_record
from rlhf_core.stages.job_context import node_cache

app = typer.Typer()

WHAT = typer.Argument(
    help="Artifact, alias, or ID of a run; defaults to the whole store.", autocompletion=artifact_names
)


@printing(app, panels.STORE, "verify")
def verify_command(ref: Annotated[str | None, WHAT] = None) -> Printed[Integrity]:
    """Compare every blob with its hash, and every manifest with its spec.

    Nothing is changed. The exit code is 1 if anything is damaged.
    """
    result = _verified(ArtifactRepository(open_store(store_url())), ref)
    error = None
    if all(item.what == MISSING for item in result.damage) and result.damage:
        what = "`alignment repair` puts back what this node's cache has, and their recipes compute the others again"
        error = StoreError(f"{_count(result.damage)} missing: {what}")
    elif result.damage:
        error = StoreError(f"{_count(result.damage)} damaged: `alignment repair` takes them out of use")
    return Printed(_integrity(result), (), error)


@printing(app, panels.STORE, "repair")
def repair_command(
    ref: Annotated[str | None, WHAT] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Printed[Integrity]:
    """Restore damaged blobs from this node's cache, or take them out of use.

    The store is verified first. Objects out of use are not deleted, but moved below `damaged/`; the next run computes
    their stages again.
    """
    repository = ArtifactRepository(open_store(store_url()))
    result = _verified(repository, ref)
    if not result.damage or dry_run:
        return Printed(_integrity(result))
    if not yes and not _confirmed(f"take the {_count(result.damage)} above out of use?"):
        return Printed(_integrity(result), ["nothing was changed"])
    repairs = {}
    for done in repair(repository, result.damage, node_cache()):
        repairs[done.damage.path] = done.done
        console.print(f"{done.damage.path}: {done.done}")
    lost = {one for item in result.damage for one in item.artifacts if not _is_whole(repository, one)}
    commands = list(_commands(repository, lost))
    return Printed(_integrity(result, repairs, commands), commands)


def _integrity(result: Verification, repairs: Mapping[str, str] = {}, commands: list[str] | None = None) -> Integrity:
    damaged = [
        DamagedObject(item.path, item.what, [ref.full for ref in item.artifacts], repairs.get(item.path, ""))
        for item in result.damage
    ]
    return Integrity(result.artifacts, result.blobs, result.num_bytes, damaged, commands or [])


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort as error:
        if isinstance(error.__context__, EOFError):  # else it was Ctrl-C
            raise StoreError("stdin is closed: pass --yes. Nothing was changed.") from error
        raise


def _verified(repository: ArtifactRepository, ref: str | None) -> Verification:
    refs = None if ref is None else _refs(repository, ref)
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("blobs", total=None)
        result = verify(
            repository, refs, progress=lambda done, total, num_bytes: bar.update(task, completed=done, total=total)
        )
    if refs is None and not (result.artifacts or result.blobs):
        raise StoreError(f"the store {repository.store.url} is empty: correct ALIGNMENT_STORE, or run a recipe first")
    if result.damage:
        console.print(_table(result.damage))
    text = f"{result.artifacts} artifacts, {result.blobs} blobs, {result.num_bytes} bytes read"
    console.print(f"{text}: {'all whole' if not result.damage else f'{len(result.damage)} damaged'}", highlight=False)
    return result


def _refs(repository: ArtifactRepository, text: str) -> Collection[ArtifactRef]:
    record = None if "/" in text or not is_path(text) else _record(repository, text)
    if record is None:
        return [repository.resolve(text)]
    return {node.ref for node in record.nodes if node.outcome in ("reused", "computed")}


def _record(repository: ArtifactRepository, run_id: str) -> RunRecord | None:
    try:
        return read_record(repository.store, run_id)
    except IntegrityError:  # damaged too, or of another release: then the run cannot help
        return None


def _table(damage: Iterable[Damage]) -> Table:
    table = Table()
    for column in ("object", "damage", "artifacts"):
        table.add_column(column, overflow="fold")
    for item in damage:
        table.add_row(item.path, item.what, ", ".join(map(str, item.artifacts)) or "none")
    return table


def _count(damage: Collection[Damage]) -> str:
    return f"{len(damage)} object{'s' if len(damage) > 1 else ''}"


def _is_whole(repository: ArtifactRepository, ref: ArtifactRef) -> bool:
    return repository.manifest(ref) is not None


def _commands(repository: ArtifactRepository, lost: Collection[ArtifactRef]) -> Iterable[str]:
    """Yield the commands that compute the lost artifacts again, by the runs that used them."""
    open_refs = set(lost)
    for path in reversed(repository.store.list("runs/")):
        record = _record(repository, path.split("/")[1]) if open_refs and path.endswith("/run.json") else None
        computed = set() if record is None else open_refs & {node.ref for node in record.nodes}
        if record is not None and computed:
            open_refs -= computed
            command = shlex.join(["alignment", "run", str(record.recipe.get("name", "RECIPE")), *record.overrides])
            yield f"{', '.join(sorted(map(str, computed)))} will be computed again by `{command}` (run {record.run_id})"
    if open_refs:
        yield f"{', '.join(sorted(map(str, open_refs)))} will be computed again when their recipe is run"
