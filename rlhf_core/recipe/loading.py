"""Load a recipe: YAML file, then `key=value` overrides, then one frozen `Recipe`; every mistake is one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.texts import is_unicode
from rlhf_core.errors import RecipeError, did_you_mean, one_line
from rlhf_core.recipe.extending import EXTENDS, read_recipe
from rlhf_core.recipe.folder import recipe_folder
from rlhf_core.recipe.known_recipes import RECIPES_VARIABLE, known_recipes
from rlhf_core.recipe.language import with_nulls
from rlhf_core.recipe.mistakes import sentence, shown
from rlhf_core.recipe.patterns import with_files
from rlhf_core.recipe.places import Override, Places
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.system.paths import file_problem
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml

_MOST_MISTAKES = 50  # reported at once
_MOST_KEYS = 50  # of an override, one inside the other


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    recipe: Recipe
    root: Path  # the folder that relative paths in the recipe start from, see RecipeFolder
    notes: tuple[str, ...] = ()  # what to know of it that is no mistake


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load the recipe `name_or_path` (a key of `known_recipes`, or a file) with `key.key=value` overrides applied in
    order.

    Raises RecipeError with a sentence per line: each names the place, the key, the problem, and valid values.
    """
    path = _find(name_or_path)
    data, files = read_recipe(path)
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping (`name:`, `data:`, `base:`, …), this is {_kind(data)}")
    notes = tuple(
        f"{key} is empty in the recipe, so it is not part of the run"
        for key, section in data.items()
        if section is None and key in Recipe.block_names()
    )
    applied = [_apply_override(data, override) for override in overrides]
    root = recipe_folder([file.parent for file in files])
    return LoadedRecipe(with_files(_validate(data, Places(files, applied)), root), root, notes)


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if problem := file_problem(path):
            raise RecipeError(f"{path}: {problem}; `alignment recipes` lists recipes")
        return path
    recipes = known_recipes()
    if name_or_path in recipes:
        return recipes[name_or_path]
    beside = (f"{name_or_path}.yaml", os.path.join(name_or_path, "recipe.yaml"))
    if near := next((file for file in beside if os.path.isfile(file)), None):
        raise RecipeError(f"unknown recipe `{name_or_path}` (did you mean `{near}`?)")
    if path.name != name_or_path or os.path.lexists(path):
        raise RecipeError(
            f"{name_or_path} is not a recipe: give the path of a .yaml file, or a name of `alignment recipes`"
        )
    known = f"known by name are {', '.join(recipes)}" if recipes else f"set {RECIPES_VARIABLE} to a folder of recipes"
    raise RecipeError(
        f"unknown recipe `{name_or_path}`{did_you_mean(name_or_path, recipes)}; {known}, or give the path of a "
        ".yaml file"
    )


def _apply_override(data: dict[str, Any], override: str) -> Override:
    """Apply the override to `data` in place and return it."""
    key, equals, value = override.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    label = f"override `{one_line(override)}`"
    if not is_unicode(override):
        raise RecipeError(f"{label}: it is not UTF-8: write it in a terminal that is")
    if not equals or not all(keys) or len(keys) > _MOST_KEYS:
        raise RecipeError(f"{label}: write it as key.key=value, such as rl.steps=200")
    if keys[0] == EXTENDS:
        raise RecipeError(f"{label}: what a recipe extends is read before overrides are: write it in the recipe's file")
    *sections, last = keys
    target = data
    for depth, section in enumerate(sections, 1):
        inner = target.get(section)
        if inner is None:
            inner = target[section] = {}
        if not isinstance(inner, dict):
            raise RecipeError(
                f"{label}: `{one_line('.'.join(keys[:depth]))}` is {_kind(inner)}, it has no keys below it"
                + ("; give the whole list, such as key=[a, b]" if isinstance(inner, list) else "")
            )
        target = inner
    try:
        parsed = read_yaml(value)
    except YAMLTextError as error:
        raise RecipeError(f"{label}: {error}") from error
    if parsed is None and len(keys) == 1 and last in data and last not in Recipe.model_fields:
        del data[last]  # a stage is taken away, whatever its name
    else:
        target[last] = parsed
    return keys, override


def _validate(data: dict[str, Any], places: Places) -> Recipe:
    data = with_nulls(data)
    try:
        # Through JSON, so that strict types still take a YAML list for a tuple.
        return Recipe.model_validate_json(json.dumps(data))
    except ValidationError as error:
        texts: dict[tuple[Any, ...], str] = {}
        for problem in (*error.errors(), *_problems_of_stages(data, error)):
            if _follows_from_another(problem):
                continue
            if len(texts) == _MOST_MISTAKES:
                break
            location, text = sentence(data, problem)
            earlier = texts.setdefault(tuple(location), text)
            if earlier != text:  # a value of one of several types is valid: `a` or a list
                texts[tuple(location)] = f"{earlier}; or {text.partition(': ')[2]}"
        raise RecipeError("\n".join(one_line(f"{places.of(at)}: {text}") for at, text in texts.items())) from error


def _follows_from_another(problem: Any) -> bool:
    """Return whether the problem results from another: pydantic reports lists as too short without invalid entries."""
    return problem["type"] == "too_short" and bool(len(problem["input"]) >= problem["ctx"]["min_length"])


def _problems_of_stages(data: dict[str, Any], error: ValidationError) -> Iterator[Any]:
    """Yield the problems of stages, which pydantic does not validate if another key is no stage."""
    stages = [key for key in data if key not in Recipe.model_fields]
    if any(problem["loc"][:1] and problem["loc"][0] in stages for problem in error.errors()):
        return
    for key in stages:
        if data[key] is None and key in Recipe.block_names():
            continue
        try:
            Recipe.validated_block(key, data[key])
        except ValidationError as stage_error:
            yield from stage_error.errors()


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}.get(type(value), shown(value))
