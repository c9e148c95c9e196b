"""A value that cannot be meant, and a key that there is not, are named by their whole path, wherever they stand.

pydantic puts the types of values into its paths, and some are called as a setting is: `function`, `tools`, `alpha`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from rlhf_core.config.algorithm_table import ALGORITHMS
from rlhf_core.config.base import Config
from rlhf_core.config.data import DatasetConfig
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.language import configs_of
from rlhf_core.pipeline.loading import load_recipe
from rlhf_core.pipeline.recipe import Recipe
from rlhf_core.stages.table import STAGES
from tests.rlhf_core.recipe_text import RECIPE

Place = tuple[tuple[str, dict[str, Any]], ...]  # keys from the outermost, each with what else its mapping needs
UNKNOWN = "xyzzy"
NOTHING_TAKES = {"zzz": [{"zz": 1}]}
ANY_MAPPING = ("options", "parameters")  # of functions and models


def places(config: type[Config], at: Place, seen: set[type[Config]]) -> Iterator[tuple[type[Config], Place]]:
    """The class and those below it, each once."""
    if config in seen:
        return
    seen.add(config)
    yield config, at
    for name, field in config.model_fields.items():
        for annotation, in_mapping in types_in(field.annotation):
            for below in configs_of([annotation]):
                kinds = get_args(below.model_fields["type"].annotation) if "type" in below.model_fields else ()
                chosen = {"type": kinds[0]} if kinds else {}
                yield from places(
                    below, (*at, *(((name, {}), ("k", chosen)) if in_mapping else ((name, chosen),))), seen
                )


def types_in(annotation: Any) -> Iterator[tuple[Any, bool]]:
    """The types that a value may have, and whether each is that of the values of a mapping."""
    if get_origin(annotation) is dict:
        yield get_args(annotation)[1], True
    elif get_origin(annotation) is None:
        yield annotation, False
    elif get_origin(annotation) not in (list, tuple):
        for option in get_args(annotation):
            yield from types_in(option)


def all_places() -> Iterator[tuple[type[Config], Place]]:
    seen: set[type[Config]] = {STAGES["rl"].config}
    written = [name for name in Recipe.block_names() if name not in ("rl", "merge")]
    for name in written:
        yield from places(STAGES[name].config, (("x", {"stage": name}),), seen)
    yield from places(DatasetConfig, (("data", {}), ("d", {})), seen)
    for entry in ALGORITHMS.values():
        yield from places(entry.config, (("rl", {}), (entry.block, {})), seen)
    for name, field in STAGES["rl"].config.model_fields.items():
        for below in configs_of([field.annotation]):
            kinds = get_args(below.model_fields["type"].annotation) if "type" in below.model_fields else ()
            yield from places(below, (("rl", {}), (name, {"type": kinds[0]} if kinds else {})), seen)


def override(at: Place, key: str, value: Any) -> str:
    """That sets `key` there, and nothing beside it in `rl`, which other settings need."""
    names = [name for name, _ in at]
    written: Any = {**at[-1][1], key: value}
    for index in range(len(at) - 1, 0, -1):
        if names[0] == "rl" and index == 1:
            return f"rl.{names[1]}={json.dumps(written)}"
        written = {**at[index - 1][1], names[index]: written}
    return f"{names[0]}={json.dumps(written)}"


@pytest.mark.parametrize("at", [pytest.param((config, place), id=config.__name__) for config, place in all_places()])
def test_a_mistake_is_named_by_its_whole_path(at: tuple[type[Config], Place], tmp_path: Path) -> None:
    config, place = at
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    names = [name for name, _ in place]
    keys = [name for name in config.model_fields if name not in ("type", "stage", *ANY_MAPPING)]
    for key, value in [(UNKNOWN, 1), *((key, NOTHING_TAKES) for key in keys)]:
        overrides = [override(place, key, value)]
        if names[0] == "rl" and names[1] in {entry.block for entry in ALGORITHMS.values()}:
            algorithm = next(name for name, entry in ALGORITHMS.items() if entry.block == names[1])
            overrides.insert(0, f"rl.algorithm={algorithm}")
        with pytest.raises(RecipeError) as raised:
            load_recipe(str(recipe), overrides)
        path = ".".join([*names, key])
        assert f"`{path}`" in str(raised.value) or f"`{path}." in str(raised.value), overrides
