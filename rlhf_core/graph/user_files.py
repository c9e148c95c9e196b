"""The user's files named by a config, whose content is part of the stage key, and variables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.base import Config, NamedFolder, configs_below
from rlhf_core.config.stages.base_model import MODEL_SUFFIXES
from rlhf_core.data.sources.harbor import files_of_tasks
from rlhf_core.data.sources.opening import name_problem
from rlhf_core.errors import RecipeError, one_line
from rlhf_core.models.folders.folder import TEMPLATES
from rlhf_core.system.paths import file_problem

_SETTINGS = {"images": "images.folder", "tasks": "task_folder"}  # that name a folder, by what it holds


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
        below = sorted(path for path in (root / folder).rglob("*") if path.suffix.lower() in named.suffixes)
        names = [path.relative_to(root / folder).as_posix() for path in below if path.is_file()]
        what = f"has no file that ends in {', '.join(named.suffixes)}" if (root / folder).is_dir() else "is not there"
    except OSError as error:
        raise RecipeError(f"{place}: {folder}: this folder cannot be read ({error.strerror})") from error
    if not names:
        raise RecipeError(f"{place}: {folder}: this folder {what}")
    return [f"{folder.rstrip('/')}/{name}" for name in names]


def task_files(root: Path, folder: str) -> list[str]:
    """Return the files of the user's task folders below `folder`, as `folder/name`. Raises RecipeError if none."""
    try:
        names = [path.relative_to(root / folder).as_posix() for path in files_of_tasks(root / folder)]
    except OSError as error:
        raise RecipeError(f"{folder}: this folder of tasks cannot be read ({error.strerror})") from error
    if not names:
        raise RecipeError(f"{folder}: there is no folder of a task, which has a task.toml (looked in {root / folder})")
    return [f"{folder.rstrip('/')}/{name}" for name in names]


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
    if folder.holds == "a model":
        return model_files(root, folder.path)
    return task_files(root, folder.path) if folder.holds == "task folders" else files_below(root, folder)


def _digest(root: Path, path: str) -> str:
    problem = name_problem(path) or file_problem(root / path)
    if problem:
        raise RecipeError(f"{one_line(path)}: the recipe names this file, but {problem}")
    try:
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{path}: the recipe names this file, but it cannot be read ({error.strerror})") from error
