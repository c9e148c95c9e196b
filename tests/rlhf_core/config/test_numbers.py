"""Every number of a recipe has a minimum and a maximum, and values outside are rejected with both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.numbers import GPUs, LearningRate, Steps
from rlhf_core.recipe.recipe import Recipe
from tests.rlhf_core.config.test_settings_are_read import reachable


def numbers(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema of every number in a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number") and "const" not in schema and "enum" not in schema:
            yield schema
        for below in schema.values():
            yield from numbers(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from numbers(below)


@pytest.mark.parametrize("config", reachable(Recipe), ids=lambda config: config.__name__)
def test_every_number_has_a_lowest_and_a_highest_value(config: Any) -> None:
    for name, field in config.model_json_schema()["properties"].items():
        for number in numbers(field):
            assert number.keys() & {"minimum", "exclusiveMinimum"}, name
            assert number.keys() & {"maximum", "exclusiveMaximum"}, name


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Steps, 10**30, "it must be from 1 to 10000000"),
        (LearningRate, 10.0, "it must be more than 0 and at most 1: no model learns at such a rate"),
        (LearningRate, 0.0, "it must be more than 0 and at most 1: nothing would be trained"),
        (LearningRate, math.nan, "it must be more than 0 and at most 1"),
        (LearningRate, -math.inf, "nothing would be trained"),
        (GPUs, 1.5, "1.5 GPUs: Ray reserves a part of one GPU, or several whole ones"),
    ],
)
def test_what_is_beyond_is_refused(kind: Any, value: float, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(kind).validate_python(value)
