"""`alignment export`: a model of the store as a folder that transformers loads, with its card; or on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.artifacts.lineage import lineage
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.texts import is_hub_name
from rlhf_core.errors import StageError, StoreError, reason_of
from rlhf_core.inference.model_card import evaluations_of, hub_model, model_card
from rlhf_core.inference.models import merge, named_models
from rlhf_core.models.folders.folder import ADAPTER_CONFIG
from rlhf_core.system.paths import user_path
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.tracking.protocol import is_of_tracking

_EXPORTED = frozenset({Kind.BASE_MODEL, Kind.POLICY, Kind.ADAPTER, Kind.REWARD_MODEL})
_HUB_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Exported:
    """A model to export, and its form."""

    name: str  # stage/key or an alias
    merged: bool = False  # an adapter as the model that it makes of its base
    base: str | None = None  # of an adapter: the repository on the hub that it is loaded with
    licence: str | None = None


def export_folder(repository: ArtifactRepository, what: Exported, target: Path) -> Path:
    """Write the model to the folder `target`, completely or not at all.

    Raises StoreError if `target` exists, or there is no such model.
    """
    target = user_path(target).absolute()
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists already: give another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("export", target.parent) as folder:
        build(repository, what, folder).rename(target)
    return target


def build(repository: ArtifactRepository, what: Exported, folder: Path) -> Path:
    """Write the model and its card to a new folder in `folder`, and return that."""
    manifest = repository.find(what.name)
    if manifest.kind not in _EXPORTED:
        raise StoreError(f"{manifest.ref} is of the kind {manifest.kind}, not a model")
    if manifest.kind != Kind.ADAPTER and (what.merged or what.base is not None):
        raise StoreError(f"{manifest.ref} is not an adapter: omit --merge and --base")
    made = folder / "model"
    made.mkdir()
    if what.merged:
        (model,) = named_models([manifest.ref.full], None)
        merge(model, made)
    else:
        files = {file.path: file.sha256 for file in manifest.files if not is_of_tracking(file.path)}
        repository.get_folder(files, made)
    adapter = (made / ADAPTER_CONFIG).is_file()
    if adapter:
        _name_base(made / ADAPTER_CONFIG, *_base(repository, manifest, what.base))
    ancestors = lineage(repository, manifest.ref)
    evaluations = evaluations_of(repository, manifest.ref)
    card = model_card(manifest, ancestors, evaluations, adapter=adapter, licence=what.licence)
    (made / "README.md").write_text(card, encoding="utf-8")
    return made


def upload(folder: Path, repository: str, *, public: bool) -> str:
    """Upload the folder as one commit to the model `repository` on the hub, which is made if it is not there.

    Returns the address of the commit. Raises StoreError.
    """
    from huggingface_hub import HfApi

    if not is_hub_name(repository):
        raise StoreError(f"`{repository}` is not a name on the hub: write hub:owner/name")
    hub = HfApi()
    try:
        hub.create_repo(repository, private=not public, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export a model with its card"
        )
    except Exception as error:  # the library raises many types; all mean that it is not uploaded
        raise StoreError(f"{repository} cannot be uploaded to the hub: {reason_of(error)}") from error
    return str(commit.commit_url)


def _base(repository: ArtifactRepository, adapter: Manifest, named: str | None) -> tuple[str, str | None]:
    """Return the repository, and its commit if that is known, that the adapter is loaded with."""
    if named is not None:
        if not is_hub_name(named):
            raise StoreError(f"--base {named}: give the base's name on the hub, owner/name")
        return named, None
    parent = repository.find(adapter.parents["model"].full)
    hub = hub_model(parent)
    if hub is None:
        raise StageError(
            f"{adapter.ref} is an adapter on {parent.ref}, which is not on the hub as far as its manifest says: give "
            "--merge for the whole model, or --base owner/name"
        )
    return hub, next(iter(parent.pins.values()), None)


def _name_base(path: Path, base: str, revision: str | None) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"base_model_name_or_path": base, "revision": revision}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
