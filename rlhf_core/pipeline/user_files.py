"""The user's own files that a config names: their content is part of the stage key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.base import Config
from rlhf_core.config.base_model import FolderModel
from rlhf_core.config.data import FilesSource, FunctionSource
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import RecipeError

_MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")


def user_files(config: Config, root: Path) -> dict[str, str]:
    """Path as the recipe names it -> sha256, of every local file that `config` names, at any depth.

    root: the recipe's folder; relative paths start there.
    Raises RecipeError if a file cannot be read.
    """
    return {path: _digest(root, path) for path in _paths(config, root)}


def model_files(root: Path, folder: str) -> list[str]:
    """The files of the user's model folder `folder` that make it up, as `folder/name`. RecipeError if there is none."""
    try:
        names = sorted(entry.name for entry in (root / folder).iterdir() if entry.is_file())
    except OSError as error:
        raise RecipeError(f"{folder}: this folder of the base model cannot be read ({error.strerror})") from error
    return [f"{folder.rstrip('/')}/{name}" for name in names if name.endswith(_MODEL_SUFFIXES)]


def _paths(value: object, root: Path) -> Iterator[str]:
    if isinstance(value, FolderModel):
        yield from model_files(root, value.path) if "://" not in value.path else ()
    elif isinstance(value, FunctionSource | FunctionReward):
        yield value.path
    elif isinstance(value, FilesSource):
        yield from (path for path in value.paths if "://" not in path)
    elif isinstance(value, Config):
        for name in type(value).model_fields.keys() - value.unused_fields():
            yield from _paths(getattr(value, name), root)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _paths(item, root)
    elif isinstance(value, tuple):
        for item in value:
            yield from _paths(item, root)


def _digest(root: Path, path: str) -> str:
    try:
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{path}: the recipe names this file, but it cannot be read ({error.strerror})") from error
