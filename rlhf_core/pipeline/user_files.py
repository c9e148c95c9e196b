"""What a config names that is the user's own: files, whose content is part of the stage key, and variables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.base import Config
from rlhf_core.config.base_model import MODEL_SUFFIXES, BaseModelConfig, FolderModel
from rlhf_core.config.data import FilesSource, FunctionSource
from rlhf_core.config.rewards import FunctionReward, HTTPReward
from rlhf_core.errors import RecipeError


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
    return [f"{folder.rstrip('/')}/{name}" for name in names if name.endswith(MODEL_SUFFIXES)]


def named_variables(config: Config) -> frozenset[str]:
    """The environment variables that `config` names, at any depth: a job needs them, a key never has their content."""
    servers = (found for found in configs_below(config) if isinstance(found, HTTPReward))
    named = (name for server in servers for name in (server.url_variable, server.header_variable))
    return frozenset(name for name in named if name is not None)


def _paths(config: Config, root: Path) -> Iterator[str]:
    for found in configs_below(config):
        match found:
            case BaseModelConfig(template_file=str(path)):
                yield path
            case FolderModel(path=path):
                yield from model_files(root, path) if "://" not in path else ()
            case FunctionSource(path=path) | FunctionReward(path=path):
                yield path
            case FilesSource(paths=paths):
                yield from (path for path in paths if "://" not in path)


def configs_below(value: object) -> Iterator[Config]:
    """`value`, where it is a config, and every one below it that is used."""
    if isinstance(value, Config):
        yield value
        for _, setting in value.used_settings():
            yield from configs_below(setting)
    elif isinstance(value, dict):
        for item in value.values():
            yield from configs_below(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from configs_below(item)


def _digest(root: Path, path: str) -> str:
    try:
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{path}: the recipe names this file, but it cannot be read ({error.strerror})") from error
