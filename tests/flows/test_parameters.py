"""The form of the flows' parameters in Prefect's UI: the schema that the server keeps, and what it lets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.schema_tools.validation import ValidationError, validate

from deployments.stack.registration import _digest
from flows.alignment import alignment
from flows.iterative_dpo import iterative_dpo
from flows.parameters import recipe_schema
from flows.registry import decide
from flows.stage import stage
from rlhf_core.errors import VariableError

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "deployments" / "recipes").glob("*.yaml"))
TEXTS = {"type": "array", "items": {"type": "string"}, "default": []}


def schema_of(flow: Any) -> dict[str, Any]:
    schema: dict[str, Any] = flow.parameters.model_dump_for_openapi()
    return schema


def test_the_form_of_a_whole_run() -> None:
    properties = schema_of(alignment)["properties"]
    descriptions = {name: field.pop("description") for name, field in properties.items()}
    assert properties == {
        "recipe": {
            "title": "Recipe", "position": 0, "default": "tiny",
            "anyOf": [
                {"title": "Shipped recipe", "type": "string", "enum": [path.stem for path in SHIPPED]},
                {"title": "Path of a .yaml file", "type": "string"},
            ],
        },
        "overrides": {"title": "Overrides", "position": 1, **TEXTS},
        "rerun_from": {"title": "Rerun from", "position": 2, "type": "string", "default": ""},
        "budget": {
            "title": "Budget", "position": 3, "default": None,
            "anyOf": [{"title": "No limit", "type": "null"}, {"title": "Amount", "type": "number", "minimum": 0}],
        },
        "tags": {"title": "Tags", "position": 4, **TEXTS},
    }  # fmt: skip
    assert {name: text.partition(",")[0] for name, text in descriptions.items()} == {
        "recipe": "name of a shipped recipe",
        "overrides": "settings to change",
        "rerun_from": "a node that is computed again on purpose",
        "budget": "money that the run may cost",
        "tags": "further tags of the run",
    }


@pytest.mark.parametrize("flow", [alignment, stage, iterative_dpo, decide])
def test_every_parameter_has_a_title_and_a_description(flow: Any) -> None:
    for name, field in schema_of(flow)["properties"].items():
        assert field["title"] != name, f"{name}: Prefect's own title"
        assert field["description"], name


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"recipe": "tiny", "overrides": []},
        {"recipe": "/data/mine/recipe.yaml", "overrides": ["seed=1", "rl.steps=2"], "rerun_from": "sft@again"},
        {"recipe": "smollm2", "budget": 12.5, "tags": ["nightly", "of the paper"]},
        {"budget": None},
    ],
)
def test_what_server_and_flow_accept(parameters: dict[str, Any]) -> None:
    validate(parameters, schema_of(alignment), raise_on_error=True, ignore_required=False)
    assert alignment.validate_parameters(parameters).items() >= parameters.items()


@pytest.mark.parametrize(
    ("parameters", "refused"),
    [
        ({"budget": -1}, "-1 is less than the minimum of 0"),
        ({"recipe": 3}, "3 is not valid under any of the given schemas"),
        ({"overrides": "seed=1"}, "'seed=1' is not of type 'array'"),
        ({"tags": [1]}, "1 is not of type 'string'"),
    ],
)
def test_what_the_server_refuses_before_a_run_is_made(parameters: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValidationError, match=refused):
        validate(parameters, schema_of(alignment), raise_on_error=True, ignore_required=False)
    with pytest.raises(ParameterTypeError):
        alignment.validate_parameters(parameters)


def test_a_tag_is_one_line() -> None:
    with pytest.raises(ParameterTypeError, match="a tag: one line of up to 64 signs"):
        alignment.validate_parameters({"tags": ["two\nlines"]})


def test_without_a_folder_of_recipes_only_a_path_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ALIGNMENT_RECIPES")
    assert recipe_schema() == {"type": "string"}
    for name in ("b.yaml", "a.yaml", "rows.py"):
        (tmp_path / name).touch()
    monkeypatch.setenv("ALIGNMENT_RECIPES", str(tmp_path))
    assert recipe_schema()["anyOf"][0]["enum"] == ["a", "b"]
    monkeypatch.setenv("ALIGNMENT_RECIPES", str(tmp_path / "none"))
    with pytest.raises(VariableError, match="ALIGNMENT_RECIPES"):
        recipe_schema()


def test_a_further_recipe_registers_the_form_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGNMENT_RECIPES", str(tmp_path))
    before = _digest("http://server/api")
    assert _digest("http://server/api") == before
    (tmp_path / "mine.yaml").touch()
    assert _digest("http://server/api") != before
