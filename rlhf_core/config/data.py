"""Where rows come from and what they mean. One entry of the recipe's `data` becomes one dataset artifact."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Config, NonNegativeInt, PositiveFloat, PositiveInt

# The canonical columns of each format are documented in rlhf_core/data/formats.py.
DataFormat = Literal["text", "conversations", "preferences", "prompts"]


class FilesSource(Config):
    """Local, S3 or any fsspec files: json, jsonl, csv, parquet."""

    type: Literal["files"]
    paths: tuple[str, ...] = Field(min_length=1)


class HubSource(Config):
    type: Literal["hub"]
    repository: str
    subset: str | None = None
    split: str = "train"
    revision: str = Field("main", description="a branch, a tag, or better: a commit")


class ReasoningGymSource(Config):
    """Generated, verifiable tasks. Item i of a task is made from `seed` + i."""

    type: Literal["reasoning_gym"]
    tasks: dict[str, dict[str, Any]] = Field(min_length=1, description="task name -> its generator's options")
    size: PositiveInt = Field(description="rows of each task")
    seed: NonNegativeInt


class FunctionSource(Config):
    """A user's Python function `(**options) -> list of rows`; the file's content is part of the stage key."""

    type: Literal["function"]
    path: str
    function: str
    options: dict[str, Any] = {}


Source = Annotated[FilesSource | HubSource | ReasoningGymSource | FunctionSource, Field(discriminator="type")]


class WeightedSource(Config):
    source: Source
    weight: PositiveFloat = 1.0


class DatasetConfig(Config):
    format: DataFormat
    source: Source | None = None
    mix: tuple[WeightedSource, ...] = Field((), description="several sources, drawn by weight, instead of `source`")
    columns: dict[str, str] = Field({}, description="canonical column -> the source's column")
    limit: PositiveInt | None = None
    exclude: tuple[str, ...] = Field((), description="datasets whose prompts must not occur here")
    drop_duplicates: bool = True
    shuffle: bool = True
