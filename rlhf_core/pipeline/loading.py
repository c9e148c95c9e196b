"""YAML file, then `key=value` overrides, then one frozen recipe; every mistake is one clear sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from rlhf_core.config.base import Config, KeyedConfig
from rlhf_core.config.typed import config_classes
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.pipeline.recipe import Recipe
from rlhf_core.pipeline.yaml_text import YAMLTextError, read_yaml, read_yaml_file

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
    try:
        data = read_yaml_file(path)
    except YAMLTextError as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is {_kind(data)}")
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
        f"unknown recipe `{name_or_path}`{did_you_mean(name_or_path, known)}; {named}, or give the path of a .yaml file"
    )


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
    try:
        target[last] = read_yaml(value)
    except YAMLTextError as error:
        raise RecipeError(f"override `{override}`: {error}") from error


def _validate(data: dict[str, Any], where: str) -> Recipe:
    try:
        # Through JSON, so that strict types still take a YAML list for a tuple.
        return Recipe.model_validate_json(json.dumps(data))
    except TypeError as error:
        raise RecipeError(f"{where}: only text, numbers, true/false, lists and mappings: {error}") from error
    except ValidationError as error:
        problems = [_sentence(data, problem) for problem in (*error.errors(), *_problems_of_stages(data, error))]
        raise RecipeError(f"{where}: " + "; ".join(problems)) from error


def _problems_of_stages(data: dict[str, Any], error: ValidationError) -> Iterator[Any]:
    """Those that pydantic has not looked for, because a key that is no stage is wrong already."""
    stages = [key for key in data if key not in Recipe.model_fields]
    if any(problem["loc"][:1] and problem["loc"][0] in stages for problem in error.errors()):
        return
    for key in stages:
        try:
            Recipe.validated_block(key, data[key])
        except ValidationError as found:
            yield from found.errors()


def _sentence(data: dict[str, Any], problem: Any) -> str:
    location = [part for part in problem["loc"] if part != "[key]"]  # of a mapping: the key itself is wrong
    place = _dotted(data, location)
    if problem["type"] == "extra_forbidden":
        *parents, wrong = location
        hint = "" if parents else "; a stage with a name of its own says which stage it is by `stage:`"
        return f"unknown key `{place}`{did_you_mean(str(wrong), _known_keys(data, parents))}{hint}"
    if problem["type"] == "missing":
        return f"`{place}` is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"`{place}`: {message}"
    return f"`{place}` is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _dotted(data: Any, location: Sequence[Any]) -> str:
    """The key as a person writes it: pydantic puts the tag of a union (`files`, `scratch`) into the location too."""
    return ".".join(str(part) for part, tag, _ in _walk(data, location) if not tag) or "the recipe"


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}.get(type(value), f"{value!r}")


def _known_keys(data: Any, parents: Sequence[Any]) -> list[str]:
    """The keys that the recipe language allows below `parents`."""
    *_, (_, _, below) = _walk(data, parents) if parents else [(None, False, [Recipe])]
    return sorted({key for config in _configs_of(below) for key in keys_of(config)})


def keys_of(config: type[Config]) -> list[str]:
    """The keys that a mapping of this class may have, as far as they are known beforehand."""
    blocks = config.block_names() if issubclass(config, KeyedConfig) else ()
    return list(dict.fromkeys([*config.model_fields, *blocks]))


def _walk(data: Any, location: Sequence[Any]) -> Iterator[tuple[Any, bool, list[Any]]]:
    """Each part of a location in `data`, whether it is the tag of a union, and the types of what is below it.

    Only the place tells a tag from a key: `reward_model` is a stage, and a tag below `rl.ppo.rewards.*`.
    """
    here: list[Any] = [Recipe]
    for part in location:
        tagged = [config for config in _configs_of(here) if part in get_args(_tag(config))]
        if tagged:
            here = tagged
        else:
            data = _item(data, part)
            here = [below for annotation in here for below in _below(annotation, part, data)]
        yield part, bool(tagged), here


def _tag(config: type[Config]) -> Any:
    return config.model_fields["type"].annotation if "type" in config.model_fields else None


def _item(data: Any, part: Any) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None


def _below(annotation: Any, part: Any, raw: Any) -> Iterator[Any]:
    """The types that the item `part`, written as `raw`, may have in a value of the type `annotation`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        for config in config_classes(annotation):
            if part in config.model_fields:
                yield config.model_fields[part].annotation
            elif issubclass(config, KeyedConfig):
                yield _block_class(config, part, raw)
    elif get_origin(annotation) is dict:
        yield get_args(annotation)[1]
    elif get_origin(annotation) in (tuple, list):
        yield from (item for item in get_args(annotation) if item is not Ellipsis)
    else:
        yield from (below for option in get_args(annotation) for below in _below(option, part, raw))


def _block_class(config: type[KeyedConfig], key: str, raw: Any) -> type[Config] | None:
    try:
        return config.block_class(key, raw)
    except ValueError:
        return None


def _configs_of(annotations: Sequence[Any]) -> Iterator[type[Config]]:
    """The config classes that values of these types may be, not those inside of them."""
    for annotation in annotations:
        yield from config_classes(annotation)
