"""Recipes available by name: the files of one folder."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.system.variables import folder_of

RECIPES_VARIABLE = "ALIGNMENT_RECIPES"


def known_recipes() -> dict[str, Path]:
    """Return the recipes available by name: the .yaml files of the folder ALIGNMENT_RECIPES, if it is set."""
    folder = folder_of(RECIPES_VARIABLE)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}
