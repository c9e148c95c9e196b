"""YAML file, then `key=value` overrides, then one frozen recipe; every mistake is one clear sentence."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.config.recipe import Recipe
from rlhf_core.config.rl import RLConfig
from rlhf_core.errors import RecipeError

RECIPES_VARIABLE = "ALIGNMENT_RECIPES"


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    recipe: Recipe
    root: Path  # the folder that relative paths in the recipe start from


def known_recipes() -> dict[str, Path]:
    """Recipes that can be given by name: the .yaml files of the folder ALIGNMENT_RECIPES, where it is set."""
    folder = os.environ.get(RECIPES_VARIABLE)
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))} if folder else {}


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe `name_or_path` (a key of `known_recipes`, or a file) with `key.key=value` overrides applied in order.

    Raises RecipeError, whose text names the key, what is wrong with it, and the nearest right one.
    """
    path = _find(name_or_path)
    data = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is {_kind(data)}")
    data = _unshared(data)
    for override in overrides:
        _apply_override(data, override)
    return LoadedRecipe(_validate(data, str(path)), path.parent.resolve())


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"{path}: there is no such recipe file")
    known = known_recipes()
    if name_or_path in known:
        return known[name_or_path]
    named = f"known by name are {', '.join(known)}" if known else f"{RECIPES_VARIABLE} names no folder of recipes"
    raise RecipeError(
        f"unknown recipe `{name_or_path}`{_nearest(name_or_path, list(known))}; {named}, "
        "or give the path of a .yaml file"
    )


def _parse_yaml(text: str, where: str) -> Any:
    # YAML 1.2, so that 1e-4 is a number and `no` is a word; the safe loader builds plain values only.
    try:
        return YAML(typ="safe", pure=True).load(StringIO(text))
    except YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def _unshared(value: Any) -> Any:
    """A copy in which what YAML aliases share is one mapping in each place, so that an override changes one."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"override `{override}`: write it as key.key=value")
    *sections, last = key.strip().split(".")
    target = data
    for section in sections:
        inner = target.get(section)
        if inner is None:
            inner = target[section] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"override `{override}`: `{section}` is {_kind(inner)}, it has no keys below it")
        target = inner
    target[last] = _parse_yaml(value, f"override `{override}`")


def _validate(data: dict[str, Any], where: str) -> Recipe:
    try:
        # Through JSON, so that strict types still take a YAML list for a tuple.
        return Recipe.model_validate_json(json.dumps(data))
    except TypeError as error:
        raise RecipeError(f"{where}: only text, numbers, true/false, lists and mappings: {error}") from error
    except ValidationError as error:
        problems = [_sentence(problem) for problem in error.errors()]
        raise RecipeError(f"{where}: " + "; ".join(problems)) from error


def _sentence(problem: Any) -> str:
    location = list(problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, wrong = location
        return f"unknown key `{_dotted(location)}`{_nearest(str(wrong), _known_keys(parents))}"
    if problem["type"] == "missing":
        return f"`{_dotted(location)}` is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"`{_dotted(location)}`: {message}"
    return f"`{_dotted(location)}` is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _dotted(location: Sequence[Any]) -> str:
    """The key as a person writes it: pydantic puts the tag of a union (`files`, `scratch`) into the location too."""
    return ".".join(str(part) for part, tag, _ in _walk(location) if not tag) or "the recipe"


def _nearest(wrong: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f", did you mean `{close[0]}`?" if close else ""


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}.get(type(value), f"{value!r}")


_SCHEMA = Recipe.model_json_schema()
for _key in RLConfig.block_names():  # pydantic's schema does not know them
    _block = RLConfig.block_class(_key, {})
    assert _block is not None
    _schema = _block.model_json_schema()
    _SCHEMA["$defs"] |= _schema.pop("$defs")
    _SCHEMA["$defs"]["RLConfig"]["properties"][_key] = _schema


def _resolve(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The object schemas that `schema` may stand for, with references followed."""
    if "$ref" in schema:
        return _resolve(_SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    options = schema.get("anyOf", []) + schema.get("oneOf", [])
    if options:
        return [found for option in options for found in _resolve(option)]
    return [schema]


def _known_keys(parents: Sequence[Any]) -> list[str]:
    """The keys that the recipe language allows below `parents`."""
    here = [_SCHEMA]
    for _, _, below in _walk(parents):
        here = below
    return sorted({key for schema in here for key in schema.get("properties", {})})


def _walk(location: Sequence[Any]) -> Iterator[tuple[Any, bool, list[dict[str, Any]]]]:
    """Each part of a location, whether it is the tag of a union, and the schemas of what is below it.

    Only the place tells a tag from a key: `reward_model` is a section, and a tag below `rl.ppo.rewards.*`.
    """
    here = [_SCHEMA]
    for part in location:
        tagged = [s for s in here if s.get("properties", {}).get("type", {}).get("const") == part]
        here = tagged or _below(here, part)
        yield part, bool(tagged), here


def _below(here: Sequence[dict[str, Any]], part: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for schema in here:
        if isinstance(part, int):
            options = [schema.get("items"), *schema.get("prefixItems", [])]
        else:
            options = [schema.get("properties", {}).get(part), schema.get("additionalProperties")]
        found += [one for option in options if isinstance(option, dict) for one in _resolve(option)]
    return found
