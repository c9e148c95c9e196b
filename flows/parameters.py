"""The types of the flows' parameters, as Prefect's form shows them. Their descriptions are in the docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rlhf_core.config.texts import Tag
from rlhf_core.recipe.known_recipes import known_recipes

_BUDGET = {"anyOf": [{"type": "null", "title": "No limit"}, {"type": "number", "minimum": 0, "title": "Amount"}]}


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe: one of those available by name, from a list, or a path."""
    path = {"type": "string", "title": "Path of a .yaml file"}
    names = list(known_recipes())  # none, where ALIGNMENT_RECIPES is not set
    shipped = {"type": "string", "title": "Shipped recipe", "enum": names}
    return {"anyOf": [shipped, path]} if names else {"type": "string"}


def _titled(title: str) -> Any:
    """Return a field with a title: Prefect replaces `Field(title=…)` by the parameter's name."""
    return Field(json_schema_extra={"title": title})


RecipeName = Annotated[str, WithJsonSchema(recipe_schema()), _titled("Recipe")]
Overrides = Annotated[list[str], _titled("Overrides")]
RerunFrom = Annotated[str, _titled("Rerun from")]
Budget = Annotated[float | None, Field(ge=0), WithJsonSchema(_BUDGET), _titled("Budget")]
Tags = Annotated[list[Tag], _titled("Tags")]
NodeName = Annotated[str, _titled("Stage")]
ModelName = Annotated[str, _titled("Model")]
CandidateName = Annotated[str, _titled("Candidate")]
DecisionName = Annotated[Literal["approve", "reject"], _titled("Decision")]
ApproverName = Annotated[str, Field(pattern=r"\S"), _titled("Your name")]
ReasonText = Annotated[str, Field(pattern=r"\S"), _titled("Reason")]
RoundCount = Annotated[int, Field(ge=1), _titled("Rounds")]
