"""Settings of sources of rows.

`SOURCES` lists all. A new one is a file in rlhf_core/data/sources, its config class, and one line there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from rlhf_core.config.base import NamedFolder
from rlhf_core.config.numbers import LongSeed, Rows
from rlhf_core.config.plugins import Table
from rlhf_core.config.texts import NonEmpty, Repository, Revision
from rlhf_core.config.typed import TypedConfig
from rlhf_core.config.user_code import UserFile

Streaming = Annotated[
    bool,
    Field(
        description="stream rows, without a copy of the data, until `limit` of them are kept, which `shuffle` shuffles"
    ),
]


class SourceConfig(TypedConfig):
    """Base of every source."""

    family: ClassVar[str] = "source"

    @classmethod
    def table(cls) -> Table[Any]:
        return SOURCES

    @property
    def streams(self) -> bool:
        """True if only the rows that its dataset takes are read."""
        return False

    @property
    def known_rows(self) -> int | None:
        """Number of its rows; None unless the settings say it."""
        return None


class FilesSource(SourceConfig):
    """Local, S3 or any fsspec files: json, jsonl, csv, tsv, parquet."""

    type: Literal["files"]
    paths: tuple[NonEmpty, ...] = Field(
        min_length=1,
        description="files, folders, patterns such as `part-*.jsonl`, or URLs of files; relative paths start at the "
        "recipe's folder",
    )
    streaming: Streaming = False

    @property
    def streams(self) -> bool:
        return self.streaming

    def named_files(self) -> Iterator[str]:
        yield from (path for path in self.paths if "://" not in path)


class HubSource(SourceConfig):
    type: Literal["hub"]
    repository: Repository = Field(description="`owner/name` of a data set on the Hugging Face hub")
    subset: NonEmpty | None = Field(default=None, description="the data set's configuration, if it has several")
    split: NonEmpty = Field(default="train", description="split of the data set")
    revision: Revision = Field(
        default="main", description="a commit, or a branch or tag, whose commit is part of the key"
    )
    streaming: Streaming = False

    @property
    def streams(self) -> bool:
        return self.streaming

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.repository}@{self.revision}"


class ReasoningGymSource(SourceConfig):
    """Generated, verifiable tasks. Item i of a task is made from `seed` + i."""

    type: Literal["reasoning_gym"]
    tasks: dict[str, dict[str, Any]] = Field(min_length=1, description="task name -> its generator's options")
    size: Rows = Field(description="number of rows per task")
    seed: LongSeed = Field(description="keep the seeds of training and held-out data 10 million apart")

    @property
    def known_rows(self) -> int:
        return len(self.tasks) * self.size


class FunctionSource(UserFile, SourceConfig):
    """A user's Python function `(**options) -> list of rows`; the file's content is part of the stage key."""

    type: Literal["function"]
    path: NonEmpty = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: NonEmpty = Field(description="its name in the Python file")
    options: dict[str, Any] = Field(default={}, description="the function's arguments")


class HarborSource(SourceConfig):
    """Task folders of Harbor, each a row for the environment `harbor`; all their files are part of the stage key."""

    type: Literal["harbor"]
    folder: NonEmpty = Field(
        description="a folder with the folders of tasks, or that of one; a relative path starts at the recipe's folder"
    )

    @field_validator("folder")
    @classmethod
    def _is_local(cls, folder: str) -> str:
        if "://" in folder:
            raise ValueError("task folders are read from this machine: copy them to a folder of it")
        return folder

    def named_folders(self) -> Iterator[NamedFolder]:
        yield NamedFolder(self.folder, (), "task folders", without=frozenset({".git", "__pycache__"}))


@dataclass(frozen=True, slots=True)
class SourceEntry:
    config: type[SourceConfig]
    implementation: str  # "package.module:Class" of a data.sources.base.RowSource, made from its config


SOURCES: Table[SourceEntry] = Table("sources", SourceEntry, {
    "files": SourceEntry(FilesSource, "rlhf_core.data.sources.data_files:DataFiles"),
    "hub": SourceEntry(HubSource, "rlhf_core.data.sources.hub:HubDataset"),
    "reasoning_gym": SourceEntry(ReasoningGymSource, "rlhf_core.data.sources.reasoning:ReasoningGym"),
    "function": SourceEntry(FunctionSource, "rlhf_core.data.sources.function:RowFunction"),
    "harbor": SourceEntry(HarborSource, "rlhf_core.data.sources.harbor:HarborTasks"),
})  # fmt: skip
