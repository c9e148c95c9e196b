"""Models by user-given names: a folder, an artifact or an alias; an adapter with its base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.chat.ends_of_turn import write_ends_of_turn
from rlhf_core.chat.rendering import template_texts
from rlhf_core.chat.templates import SHIPPED, check_templates, with_template
from rlhf_core.config.stages.base_model import BaseModelConfig, FolderModel
from rlhf_core.config.texts import is_hub_name
from rlhf_core.contract import KINDS_OF_ROLE
from rlhf_core.errors import RecipeError, StageError, StoreError, reason_of
from rlhf_core.models.folders.adapter_check import base_folder
from rlhf_core.models.folders.folder import ADAPTER_CONFIG, is_classifier, read_config
from rlhf_core.models.folders.headers import read_object
from rlhf_core.preflight.model import model_folder_problems
from rlhf_core.stages.job_context import node_cache
from rlhf_core.stages.table import STAGES
from rlhf_core.system.paths import user_path, writing_to
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.system.streams import kept_streams

MODELS = KINDS_OF_ROLE["model"]
_PATHS = ("/", "./", "../", "~")  # how a name begins that can be nothing but a path


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str  # as the caller wrote it
    folder: Path  # of an adapter: its base's
    adapter: Path | None = None  # its folder


def named_models(names: Sequence[str], base: str | None) -> list[NamedModel]:
    """Resolve names. names: of models and adapters; base: of adapters, whatever they were trained on.

    Raises StoreError if there is no such model, StageError if a folder is not whole or none of them is an adapter of
    `base`.
    """
    models = [_named_model(name, base) for name in names]
    if base is not None and all(model.adapter is None for model in models):
        raise StageError(f"{', '.join(names)}: this is not an adapter, so omit --base")
    return models


def _named_model(name: str, base: str | None) -> NamedModel:
    folder, manifest = found_folder(name, MODELS | {Kind.ADAPTER}, "model")
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        if manifest is None:
            require_whole(name, folder)
        return NamedModel(name, folder)
    base = base or _trained_on(name, folder, manifest)
    below, stored = found_folder(base, MODELS, "model")
    if stored is None:
        require_whole(base, below)
    return NamedModel(name, below, folder)


def _trained_on(name: str, folder: Path, manifest: Manifest | None) -> str:
    if manifest is not None and "model" in manifest.parents:
        return manifest.parents["model"].full
    local = base_folder(read_object(folder / ADAPTER_CONFIG))
    if local is None:
        raise StageError(f"{name} is an adapter, and the model it was trained on is not here: give --base MODEL")
    return str(local)


def found_folder(name: str, kinds: Collection[Kind], what: str) -> tuple[Path, Manifest | None]:
    """Return the folder, for an artifact a verified copy on this node, and an artifact's manifest. what: noun for
    messages.

    Raises StoreError if there is no such folder or artifact, or if it is none of `kinds`.
    """
    if not name.strip():
        raise StoreError(f"the name of the {what} is empty: give a folder, an artifact or an alias")
    path = user_path(name)
    if path.is_dir():
        return path.absolute(), None
    if name.startswith(_PATHS):
        raise StoreError(f"{name}: there is no such folder")
    try:
        repository = ArtifactRepository(open_store(store_url()))
        manifest = repository.find(name)
    except StoreError as error:
        of_the_hub = is_hub_name(name) and name.partition("/")[0] not in STAGES  # `sft/0a1b` is an artifact
        hub = f"; if it is on the hub: `hf download {name} --local-dir FOLDER`" if of_the_hub else ""
        raise StoreError(f"{name}: there is no such folder here; {error}{hub}") from error
    if manifest.kind not in kinds:
        raise StoreError(f"{manifest.ref} is a {manifest.kind}, not a {what}")
    return repository.fetch(manifest.ref, node_cache()), manifest


@contextmanager
def whole_model(model: NamedModel) -> Iterator[Path]:
    """Yield the folder of the whole model, for as long as the context lasts.

    An adapter is merged into its base, which needs room for the weights of the base in the system's temporary folder
    (docs/design/decisions/0027).
    """
    if model.adapter is None:
        yield model.folder
        return
    with scratch_folder("merged") as folder:
        merge(model, folder)
        yield folder


def merge(model: NamedModel, folder: Path) -> None:
    """Run `merge_adapter`; raise StageError also if `folder` has no room.

    Output of libraries is printed if it fails.
    """
    assert model.adapter is not None, "asked by the callers"
    with kept_streams(), writing_to(folder):
        from rlhf_core.models.merging import merge_adapter  # torch takes seconds

        try:
            merge_adapter(model.folder, model.adapter, folder)
            if not is_classifier(read_config(folder)):
                write_ends_of_turn(folder)
        except SafetensorError as error:  # such as of a full disk, which it does not name
            raise StageError(f"'{folder}': the merged weights cannot be written ({reason_of(error)})") from error


def chat_tokenizer(name: str, folder: Path, template: str | None) -> Tokenizer:
    """Return the tokenizer of the model in `folder`, with the chat template `template`: a recipe's name, or a file.

    Raises RecipeError if there is no such template, StageError if neither the model nor the caller has one, or if a
    reward model is in the folder.
    """
    if is_classifier(read_config(folder)):
        raise StageError(f"{name} is a reward model, which writes nothing: `alignment serve-reward` serves its rewards")
    tokenizer = load_tokenizer(folder)
    if template is not None:
        source = FolderModel(type="folder", path=str(folder))
        config = BaseModelConfig(source=source, chat_template=template)
        for problem in check_templates(config, Path(), "--"):
            raise RecipeError(problem.replace("--.chat_template", "--chat-template"))
        return with_template(tokenizer, config, Path)
    if tokenizer.chat_template is None:
        raise StageError(
            f"{name}: the tokenizer has no chat template, so prompts cannot be rendered: pass --chat-template, one of "
            f"{', '.join(SHIPPED)}, or a .jinja file"
        )
    template_texts(tokenizer)
    return tokenizer


def require_whole(name: str, folder: Path, *, reward_model: bool = False) -> None:
    """Raise StageError if the folder is no whole model with a tokenizer."""
    problem = next(model_folder_problems(folder, reward_model=reward_model, needs_template=False), None)
    if problem is not None:
        raise StageError(f"{name}: {problem}")
