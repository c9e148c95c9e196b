"""The user's files named by a config, whose content is part of the stage key, and variables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePath

from rlhf_core.config.base import Config, NamedFolder, configs_below
from rlhf_core.config.stages.base_model import MODEL_SUFFIXES
from rlhf_core.data.sources.opening import name_problem
from rlhf_core.errors import RecipeError, one_line
from rlhf_core.models.folders.folder import TEMPLATES
from rlhf_core.system.paths import file_problem

# Settings that name a folder, by what it holds.
_SETTINGS = {"images": "images.folder", "tasks": "task_folder", "task folders": "source.folder"}


def user_files(config: Config, root: Path) -> dict[str, str]:
    """Return path, as in the recipe -> sha256, of every local file that `config` names, at any depth.

    root: the recipe's folder; relative paths start there.
    Raises RecipeError if a file cannot be read.
    """
    return {path: _digest(root, path) for path in _paths(config, root)}


def model_files(root: Path, folder: str) -> list[str]:
    """Return the files of the user's model folder `folder`, as `folder/name`. Raises RecipeError if there is none."""
    try:
        names = sorted(entry.name for entry in (root / folder).iterdir() if entry.is_file())
        names += sorted(
            f"{TEMPLATES}/{path.name}" for path in (root / folder / TEMPLATES).glob("*.jinja") if path.is_file()
        )
    except OSError as error:
        raise RecipeError(f"{folder}: this folder of the base model cannot be read ({error.strerror})") from error
    return [f"{folder.rstrip('/')}/{name}" for name in names if name.endswith(MODEL_SUFFIXES)]


def files_below(root: Path, named: NamedFolder) -> list[str]:
    """Return the files of the user's folder that count, at any depth, as `folder/name`. Raises RecipeError if none."""
    folder, place = named.path, _SETTINGS[named.holds]
    try:
        below = sorted(path for path in (root / folder).rglob("*") if path.is_file())
        relative = [path.relative_to(root / folder) for path in below]
        names = [path.as_posix() for path in relative if _counts(path, named)]
        ending = f" that ends in {', '.join(named.suffixes)}" if named.suffixes else ""
        what = f"has no file{ending}" if (root / folder).is_dir() else "is not there"
    except OSError as error:
        raise RecipeError(f"{place}: {folder}: this folder cannot be read ({error.strerror})") from error
    if not names:
        raise RecipeError(f"{place}: {folder}: this folder {what}")
    return [f"{folder.rstrip('/')}/{name}" for name in names]


def _counts(path: PurePath, named: NamedFolder) -> bool:
    has_suffix = not named.suffixes or path.suffix.lower() in named.suffixes
    return has_suffix and named.without.isdisjoint(path.parts)


def named_variables(config: Config) -> frozenset[str]:
    """Return the environment variables that `config` names, at any depth: a job needs them, a key never includes their
    content.
    """
    return frozenset(name for _, part in configs_below(config) for name in part.named_variables())


def _paths(config: Config, root: Path) -> Iterator[str]:
    for _, part in configs_below(config):
        yield from part.named_files()
        for folder in part.named_folders():
            if "://" not in folder.path:
                yield from _files_of(root, folder)


def _files_of(root: Path, folder: NamedFolder) -> list[str]:
    return model_files(root, folder.path) if folder.holds == "a model" else files_below(root, folder)


def _digest(root: Path, path: str) -> str:
    problem = name_problem(path) or file_problem(root / path)
    if problem:
        raise RecipeError(f"{one_line(path)}: the recipe names this file, but {problem}")
    try:
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{path}: the recipe names this file, but it cannot be read ({error.strerror})") from error
