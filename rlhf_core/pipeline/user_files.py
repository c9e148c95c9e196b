"""The user's own files that a config names: their content is part of the stage key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.base import Config
from rlhf_core.config.data import FilesSource, FunctionSource
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import RecipeError


def user_files(config: Config, root: Path) -> dict[str, str]:
    """Path as the recipe names it -> sha256, of every local file that `config` names, at any depth.

    root: the recipe's folder; relative paths start there.
    Raises RecipeError if a file cannot be read.
    """
    return {path: _digest(root, path) for path in _paths(config)}


def _paths(value: object) -> Iterator[str]:
    if isinstance(value, FunctionSource | FunctionReward):
        yield value.path
    elif isinstance(value, FilesSource):
        yield from (path for path in value.paths if "://" not in path)
    elif isinstance(value, Config):
        for name in type(value).model_fields.keys() - value.unused_fields():
            yield from _paths(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _paths(item)


def _digest(root: Path, path: str) -> str:
    try:
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{path}: the recipe names this file, but it cannot be read ({error.strerror})") from error
