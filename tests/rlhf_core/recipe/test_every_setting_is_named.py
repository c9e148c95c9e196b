"""Invalid values and unknown keys are reported with their whole path, at any place.

pydantic puts the types of values into its paths, and some are called as a setting is: `function`, `tools`, `alpha`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from rlhf_core.config.base import Config
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.language import configs_of
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.stages.table import STAGES
from tests.rlhf_core.recipe_text import RECIPE

pytestmark = pytest.mark.endurance("mutations")

Place = tuple[tuple[str, dict[str, Any]], ...]  # keys from the outermost, each with what else its mapping needs
UNKNOWN = "xyzzy"
NOTHING_TAKES = {"zzz": [{"zz": 1}]}
ANY_MAPPING = ("options", "parameters", "deepspeed", "vllm")  # of functions, models and libraries
ALGORITHM_OF = {entry.block: name for name, entry in ALGORITHMS.items()}


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
                last = ((name, {}), ("k", chosen)) if in_mapping else ((name, chosen),)
                yield from places(below, (*at, *last), seen)


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
    seen: set[type[Config]] = set()
    yield from places(STAGES["rl"].config, (("rl", {}),), seen)
    for block in ALGORITHM_OF:
        yield from places(ALGORITHMS[ALGORITHM_OF[block]].config, (("rl", {}), (block, {})), seen)
    for name in Recipe.block_names():
        if name not in ("rl", "merge"):  # the recipe's `merge` is no stage
            yield from places(STAGES[name].config, (("x", {"stage": name}),), seen)
    yield from places(DatasetConfig, (("data", {}), ("d", {})), seen)


def override(at: Place, key: str, value: Any) -> str:
    """That sets `key` there, beside what else the mapping needs; of `rl` that is what the recipe has."""
    within = 1 if at[0][0] == "rl" else 0
    for name, given in reversed(at[within:]):
        key, value = name, {**given, key: value}
    return f"{'rl.' * within}{key}={json.dumps(value)}"


@pytest.mark.parametrize("at", [pytest.param((config, place), id=config.__name__) for config, place in all_places()])
def test_a_mistake_is_named_by_its_whole_path(at: tuple[type[Config], Place], tmp_path: Path) -> None:
    config, place = at
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    names = [name for name, _ in place]
    keys = [name for name in config.model_fields if name not in ("type", "stage", *ANY_MAPPING)]
    for key, value in [(UNKNOWN, 1), *((key, NOTHING_TAKES) for key in keys)]:
        chosen = [f"rl.algorithm={ALGORITHM_OF[name]}" for name in names[1:2] if name in ALGORITHM_OF]
        overrides = [*chosen, override(place, key, value)]
        with pytest.raises(RecipeError) as raised:
            load_recipe(str(recipe), overrides)
        path = ".".join([*names, key])
        assert f"`{path}`" in str(raised.value) or f"`{path}." in str(raised.value), overrides
