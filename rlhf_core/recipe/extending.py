"""Inheritance of recipes: a recipe extends another one of its folder, or a shipped one.

Its own settings override those of the other recipe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhf_core.config.base import NULL_WORDS
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.recipe.known_recipes import known_recipes
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.system.paths import file_problem
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml_file

EXTENDS = "extends"
_MOST_EXTENDED = 20  # one by the other
_CHOOSERS = ("stage", "type")  # keys that determine the type of their mapping


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> tuple[Any, list[Path]]:
    """Return the values of the file merged with those it extends, and all these files, its own first.

    above: the files that extend it, which it may not extend itself. Raises RecipeError.
    """
    try:
        values = read_yaml_file(path)
    except YAMLTextError as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(values, dict) or EXTENDS not in values:
        return values, [path]
    extended = _find(path, values.pop(EXTENDS))
    if extended in (*above, path):
        raise RecipeError(f"{path}: `{EXTENDS}`: {extended.name} extends this file in turn: remove one `{EXTENDS}`")
    if len(above) >= _MOST_EXTENDED:
        raise RecipeError(f"{path}: more than {_MOST_EXTENDED} recipes extend one another: join some of them")
    base, files = read_recipe(extended, (*above, path))
    if not isinstance(base, dict):
        raise RecipeError(f"{extended}: {path.name} extends it, but it is not a recipe")
    for name in [name for name in values if name in base and name not in Recipe.model_fields]:
        if values[name] is None or (isinstance(values[name], str) and values[name] in NULL_WORDS):
            del base[name], values[name]  # a stage is taken away, whatever its name
    return merged(base, values), [path, *files]


def _find(path: Path, name: Any) -> Path:
    beside = [other.stem for other in sorted(path.parent.glob("*.yaml")) if other != path]
    shipped = known_recipes()
    names = dict.fromkeys([*beside, *shipped])
    hint = f"{did_you_mean(str(name), names)}; there are {', '.join(names) or 'none'}"
    if not isinstance(name, str) or Path(name).name != name:
        raise RecipeError(f"{path}: `{EXTENDS}` names a recipe of the same folder, or a shipped one{hint}")
    file = path.with_name(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if file.stem in shipped and (not os.path.lexists(file) or file == path != shipped[file.stem]):
        return shipped[file.stem]
    if problem := file_problem(file):
        raise RecipeError(f"{path}: `{EXTENDS}`: {file.name}: {problem}{hint}")
    return file


def merged(base: Any, override: Any) -> Any:
    """Merge `override` over `base`. Mappings are merged key by key, unless they are of another `stage` or `type`;
    anything else, a list or null too, is replaced.
    """
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    if any(key in override and override[key] != base.get(key) for key in _CHOOSERS):
        return override
    both = {**base, **{key: merged(base.get(key), value) for key, value in override.items()}}
    return {key: both[key] for key in _order(list(base), list(override))}


def _order(base: list[str], override: list[str]) -> list[str]:
    """Return the keys of `base`, each new key of `override` inserted before its next key that both have: the order of
    stages counts.
    """
    order, place = list(base), len(base)
    for key in reversed(override):
        if key in base:
            place = order.index(key)
        else:
            order.insert(place, key)
    return order
