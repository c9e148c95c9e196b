"""The folder of a recipe's relative paths, with those of the recipes that it extends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PosixPath
from typing import Any


class RecipeFolder(PosixPath):
    """A path whose `/` falls back to the folders of the extended recipes for files missing in its own.

    So paths stay as they are written, and a stage key is the same in a recipe and in one that extends it.
    """

    others: tuple[Path, ...] = ()

    def __truediv__(self, name: Any) -> Path:  # type: ignore[override]
        first = Path(self, name)
        places = (first, *(Path(other, name) for other in self.others))
        return next((place for place in places if os.path.lexists(place)), first)

    def __reduce__(self) -> Any:
        return recipe_folder, ((Path(self), *self.others),)


def recipe_folder(folders: Sequence[Path]) -> Path:
    """Return the folder of a recipe, `folders[0]`, with those of the recipes that it extends."""
    first, *others = dict.fromkeys(folder.resolve() for folder in folders)
    if not others:
        return first
    folder = RecipeFolder(first)
    folder.others = tuple(others)
    return folder


def folders_of(root: Path) -> tuple[Path, ...]:
    """Return all folders that `root / name` searches."""
    return (Path(root), *root.others) if isinstance(root, RecipeFolder) else (root,)
