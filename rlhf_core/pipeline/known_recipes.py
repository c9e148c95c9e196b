"""Recipes that are known by name: those of one folder."""

from __future__ import annotations

import os
from pathlib import Path

RECIPES_VARIABLE = "ALIGNMENT_RECIPES"


def known_recipes() -> dict[str, Path]:
    """Recipes that can be given by name: the .yaml files of the folder ALIGNMENT_RECIPES, where it is set."""
    folder = os.environ.get(RECIPES_VARIABLE)
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))} if folder else {}
