"""Rubrics: criteria for completions, and settings of the judge that applies them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Tokens, Weighting
from rlhf_core.config.rewards.judges import ChatConfig
from rlhf_core.config.servers import RubricTemplate
from rlhf_core.config.texts import NonEmpty, Visible


class Criterion(Config):
    name: NonEmpty = Field(description="its name, in a file a part of the name of a metric")
    description: Visible = Field(description="what a completion must be like to meet it")
    weight: Weighting = Field(default=1.0, description="its weight; below 0 for a fault")
    required: bool = Field(default=False, description="without it, the reward is 0")

    @model_validator(mode="after")
    def _a_fault_is_not_required(self) -> Self:
        if self.required and self.weight < 0:
            raise ValueError(f"{self.name} is required, but its weight is {self.weight:g}: a fault cannot be required")
        return self


class RubricConfig(ChatConfig):
    """A judge that says of each criterion whether a completion meets it, in one reply by a JSON schema."""

    path: NonEmpty | None = Field(
        default=None, description="YAML or JSON file with the `criteria`; none: the rows' alone"
    )
    column: NonEmpty | None = Field(default=None, description="column with criteria of the row; none: the file's alone")
    template: RubricTemplate | None = Field(
        default=None,
        description="the judge's prompt, as a user's turn: Jinja with `answers` and `criteria`, numbered as in the "
        "reply, `prompt`, `messages` and `row`; none: a usual one",
    )
    max_tokens: Tokens = Field(
        default=2048, description="maximum length of a reply, which has a reason for each verdict"
    )

    def named_files(self) -> tuple[str, ...]:
        return () if self.path is None else (self.path,)

    @model_validator(mode="after")
    def _criteria_come_from_somewhere(self) -> Self:
        if self.path is None and self.column is None:
            raise ValueError("there are no criteria: set `path` to a file with them, or `column` to a column of rows")
        return self
