"""Where rows come from and what they mean. One entry of the recipe's `data` becomes one dataset artifact."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Config, NonNegativeInt, PositiveFloat, PositiveInt, Reads, Role
from rlhf_core.config.stage import StageConfig

# The canonical columns of each format are documented in rlhf_core/data/formats.py.
DataFormat = Literal["text", "conversations", "preferences", "prompts"]


class FilesSource(Config):
    """Local, S3 or any fsspec files: json, jsonl, csv, parquet."""

    type: Literal["files"]
    paths: tuple[str, ...] = Field(
        min_length=1, description="files or URLs; relative paths start at the recipe's folder"
    )


class HubSource(Config):
    type: Literal["hub"]
    repository: str = Field(description="`owner/name` of a data set on the Hugging Face hub")
    subset: str | None = Field(default=None, description="the data set's configuration, where it has several")
    split: str = Field(default="train", description="which of its splits")
    revision: str = Field(default="main", description="a commit, or a branch or tag, whose commit is part of the key")

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.repository}@{self.revision}"


class ReasoningGymSource(Config):
    """Generated, verifiable tasks. Item i of a task is made from `seed` + i."""

    type: Literal["reasoning_gym"]
    tasks: dict[str, dict[str, Any]] = Field(min_length=1, description="task name -> its generator's options")
    size: PositiveInt = Field(description="rows of each task")
    seed: NonNegativeInt = Field(description="keep the seeds of training and held-out data 10 million apart")


class FunctionSource(Config):
    """A user's Python function `(**options) -> list of rows`; the file's content is part of the stage key."""

    type: Literal["function"]
    path: str = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: str = Field(description="its name in the file")
    options: dict[str, Any] = Field(default={}, description="the function's arguments")


Source = Annotated[FilesSource | HubSource | ReasoningGymSource | FunctionSource, Field(discriminator="type")]


class WeightedSource(Config):
    source: Source = Field(description="where its rows come from")
    weight: PositiveFloat = Field(default=1.0, description="its share of the mix, relative to the others")


class DatasetConfig(StageConfig):
    format: DataFormat = Field(description="what a row means, see Rows")
    source: Source | None = Field(default=None, description="where the rows come from")
    mix: tuple[WeightedSource, ...] = Field(
        default=(), description="several sources, drawn by weight, instead of `source`"
    )
    columns: dict[str, str] = Field(default={}, description="canonical column -> the source's column")
    limit: PositiveInt | None = Field(default=None, description="rows at most; none: all")
    exclude: Annotated[tuple[str, ...], Reads("dataset")] = Field(
        default=(), description="datasets whose prompts must not occur here"
    )
    drop_duplicates: bool = Field(default=True, description="drop a row that repeats an earlier one")
    shuffle: bool = Field(default=True, description="put the rows into a random order made from the recipe's seed")

    @property
    def makes(self) -> Role:
        return "dataset"
