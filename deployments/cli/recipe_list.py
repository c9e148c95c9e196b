"""The list of available recipes, for `alignment recipes` and for a command that was called without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import RecipeError, one_line, shortened
from rlhf_core.recipe.extending import read_recipe
from rlhf_core.recipe.known_recipes import known_recipes

_SHOWN = 100  # characters of a description


@dataclass(frozen=True, slots=True)
class DescribedRecipe:
    name: str  # as the commands take it
    path: Path
    description: str  # in one line


def described_recipes() -> Iterator[DescribedRecipe]:
    """Yield the recipes of this folder and the shipped ones. A folder may have other files of YAML, or broken ones."""
    paths_by_name = {**{f"./{path.name}": path for path in sorted(Path().glob("*.yaml"))}, **known_recipes()}
    for name, path in paths_by_name.items():
        try:
            recipe, _ = read_recipe(path)
        except RecipeError:
            continue
        if isinstance(recipe, dict) and "name" in recipe and "data" in recipe:
            yield DescribedRecipe(one_line(name), path, one_line(str(recipe.get("description", ""))))


def recipe_list() -> str:
    """Return a line for each recipe, with its description."""
    recipes = list(described_recipes())
    width = max((len(recipe.name) for recipe in recipes), default=0)
    return "\n".join(f"  {each.name:<{width}}  {shortened(each.description, _SHOWN)}".rstrip() for each in recipes)
