"""The list of available recipes, for a command that was called without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import RecipeError, one_line, shortened
from rlhf_core.recipe.extending import read_recipe
from rlhf_core.recipe.known_recipes import known_recipes

_SHOWN = 100  # characters of a description


def recipe_list() -> str:
    """Return a line for each recipe of this folder and each shipped one, with its description."""
    paths_by_name = {**{f"./{path.name}": path for path in sorted(Path().glob("*.yaml"))}, **known_recipes()}
    descriptions = dict(_described(paths_by_name))
    width = max((len(name) for name in descriptions), default=0)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in descriptions.items())


def _described(paths_by_name: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield the files that are recipes: a folder may have other files of YAML, or broken ones."""
    for name, path in paths_by_name.items():
        try:
            recipe, _ = read_recipe(path)
        except RecipeError:
            continue
        if isinstance(recipe, dict) and "name" in recipe and "data" in recipe:
            yield one_line(name), shortened(one_line(str(recipe.get("description", ""))), _SHOWN)
