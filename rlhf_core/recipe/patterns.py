"""Expansion of folders and patterns in a recipe's data files.

So a stage's key, its spec and its job list each file: one more file in the folder is another dataset.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.data.sources import FilesSource, SourceConfig
from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.files import file_type
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.folder import folders_of
from rlhf_core.recipe.recipe import Recipe

MAX_FILES = 10_000


def with_files(recipe: Recipe, root: Path) -> Recipe:
    """Return `recipe` with its data files listed one by one, those of each folder and pattern sorted by name.

    root: the recipe's folder. Paths without a match are kept and reported by the check of the data.
    Raises RecipeError for one with more than 10,000 files.
    """
    return recipe.model_copy(
        update={"data": {name: _dataset(name, config, root) for name, config in recipe.data.items()}}
    )


def _dataset(name: str, config: DatasetConfig, root: Path) -> DatasetConfig:
    section = f"data.{name}"
    return config.model_copy(
        update={
            "source": None if config.source is None else _source(section, config.source, root),
            "mix": tuple(
                entry.model_copy(update={"source": _source(section, entry.source, root)}) for entry in config.mix
            ),
        }
    )


def _source(section: str, source: SourceConfig, root: Path) -> SourceConfig:
    if not isinstance(source, FilesSource):
        return source
    paths = [file for path in source.paths for file in _files(section, path, root)]
    return source.model_copy(update={"paths": tuple(paths)})


def _files(section: str, path: str, root: Path) -> list[str]:
    """Return the files that match `path`; `path` itself if it is a file, or matches none."""
    if "://" in path or not path:
        return [path]
    try:
        files = sorted(islice(_matches(path, root), MAX_FILES + 1))
    except OSError:
        return [path]  # the check of the data reports why it cannot be read
    if len(files) > MAX_FILES:
        raise RecipeError(f"{section}: {path}: stands for more than {MAX_FILES} files: name fewer")
    return files or [path]


def _matches(path: str, root: Path) -> Iterator[str]:
    local = root / path
    if local.is_dir():
        names = (entry.name for entry in local.iterdir() if not entry.name.startswith("."))
        # A pipe, or a link to nothing, is named too: the check of the data refuses it.
        yield from (f"{path.rstrip('/')}/{name}" for name in names if _is_data(name) and not (local / name).is_dir())
    elif glob.has_magic(path) and not local.exists():
        for folder in folders_of(root):
            file_names = (name for name in glob.iglob(path, root_dir=folder) if not (folder / name).is_dir())
            if (first := next(file_names, None)) is not None:
                yield first
                yield from file_names
                return


def _is_data(name: str) -> bool:
    try:
        file_type(name)
    except RowError:
        return False
    return True
