"""Settings of datasets: sources of rows and their format. One entry of the recipe's `data` becomes one dataset
artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Config, NamedFolder, Reads, Role, operational, since_default
from rlhf_core.config.data.format_table import FORMATS, known_format
from rlhf_core.config.numbers import (
    ImageBytes,
    ImagePixels,
    ImagesOfRow,
    LongSeed,
    PositiveShare,
    Processes,
    Rows,
    Similarity,
    Weight,
)
from rlhf_core.config.stages.base import SeededConfig, StageConfig
from rlhf_core.config.texts import NonEmpty, Repository, Revision
from rlhf_core.config.user_code import UserFile
from rlhf_core.system.listing import first_repeated

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # of the files of `images.folder`
# What becomes of rows that lack something, and of rows that are longer than a stage can read.
BadRowPolicy = Literal["error", "drop"]
LongRowPolicy = Literal["error", "drop", "truncate"]
OnOverlap = Literal["error", "allow"]
StoppingRule = Literal["first_exhausted", "all_exhausted"]


class FilesSource(Config):
    """Local, S3 or any fsspec files: json, jsonl, csv, tsv, parquet."""

    type: Literal["files"]
    paths: tuple[NonEmpty, ...] = Field(
        min_length=1,
        description="files, folders, patterns such as `part-*.jsonl`, or URLs of files; relative paths start at the "
        "recipe's folder",
    )
    streaming: bool = Field(
        default=False,
        description="read rows as they come, without a copy of the files, until `limit` of them are kept, which "
        "`shuffle` shuffles",
    )

    def named_files(self) -> Iterator[str]:
        yield from (path for path in self.paths if "://" not in path)


class HubSource(Config):
    type: Literal["hub"]
    repository: Repository = Field(description="`owner/name` of a data set on the Hugging Face hub")
    subset: NonEmpty | None = Field(default=None, description="the data set's configuration, where it has several")
    split: NonEmpty = Field(default="train", description="which of its splits")
    revision: Revision = Field(
        default="main", description="a commit, or a branch or tag, whose commit is part of the key"
    )
    streaming: bool = Field(
        default=False,
        description="read rows as they come, without a copy of the data set, until `limit` of them are kept, which "
        "`shuffle` shuffles",
    )

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.repository}@{self.revision}"


class ReasoningGymSource(Config):
    """Generated, verifiable tasks. Item i of a task is made from `seed` + i."""

    type: Literal["reasoning_gym"]
    tasks: dict[str, dict[str, Any]] = Field(min_length=1, description="task name -> its generator's options")
    size: Rows = Field(description="rows of each task")
    seed: LongSeed = Field(description="keep the seeds of training and held-out data 10 million apart")


class FunctionSource(UserFile):
    """A user's Python function `(**options) -> list of rows`; the file's content is part of the stage key."""

    type: Literal["function"]
    path: NonEmpty = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: NonEmpty = Field(description="its name in the file")
    options: dict[str, Any] = Field(default={}, description="the function's arguments")


Source = Annotated[FilesSource | HubSource | ReasoningGymSource | FunctionSource, Field(discriminator="type")]


class WeightedSource(Config):
    source: Source = Field(description="where its rows come from")
    weight: Weight = Field(default=1.0, description="its share of the mix, relative to the others")


class ImagesConfig(Config):
    """Images of rows. They become files of the dataset's artifact, each kept once."""

    folder: NonEmpty | None = Field(
        default=None,
        description="the folder with the image files that rows name, by paths in it; it may be an fsspec URL of a "
        "folder without folders; none: rows bring their images themselves",
    )
    max_per_row: ImagesOfRow = Field(default=8, description="a row with more is a bad row")
    max_bytes: ImageBytes = Field(default=20_000_000, description="a larger file is a bad row")
    max_pixels: ImagePixels = Field(default=40_000_000, description="an image of more pixels is a bad row")

    def named_folders(self) -> Iterator[NamedFolder]:
        if self.folder is not None:
            yield NamedFolder(self.folder, IMAGE_SUFFIXES, "images")


class DatasetConfig(SeededConfig):
    format: Annotated[str, AfterValidator(known_format)] = Field(
        description="what a row means, see Rows", json_schema_extra={"enum": [*FORMATS]}
    )
    source: Source | None = Field(default=None, description="where the rows come from")
    mix: tuple[WeightedSource, ...] = Field(
        default=(), description="several sources, drawn by weight, instead of `source`"
    )
    stop: StoppingRule = Field(
        default="first_exhausted",
        description="when a mix ends: once one source has given all its rows, or once every one has, those that end "
        "earlier beginning again",
    )
    columns: dict[str, str] = Field(default={}, description="canonical column -> the source's column")
    images: ImagesConfig = since_default(
        ImagesConfig(), description="of rows of `conversations`, `prompts` and `preferences`"
    )
    limit: Rows | None = Field(default=None, description="rows at most; none: all")
    share: PositiveShare | None = Field(
        default=None, description="of its rows, as `limit` takes them; with `exclude` another dataset has the rest"
    )
    exclude: Annotated[tuple[str, ...], Reads("dataset")] = Field(
        default=(), description="datasets whose prompts must not occur here: drop such rows"
    )
    on_overlap: OnOverlap = operational(
        "error",
        description="of a row that is trained on and has a prompt that the recipe validates or evaluates on",
    )
    on_bad_row: BadRowPolicy = Field(
        default="error",
        description="of a row that cannot be read, lacks what its format needs, or that the chat template of the stage "
        "that reads it cannot write",
    )
    on_long_row: LongRowPolicy = Field(
        default="error",
        description="of a row that is longer than the stage that reads it allows; `truncate`: cut at the end, not for "
        "prompts; pre-training splits its documents unless this says `drop` or `truncate`",
    )
    drop_duplicates: bool = Field(default=True, description="drop a row that repeats an earlier one")
    near_duplicates: Literal["count", "drop", "off"] = Field(
        default="count",
        description="of a row that is nearly an earlier one, or asks nearly a prompt that is excluded",
    )
    near_duplicate_threshold: Similarity = Field(
        default=0.8,
        description="similarity of near-duplicates, at least: the share of all sequences of five words in common",
    )
    shuffle: bool = Field(default=True, description="put the rows into a random order made from the seed")

    processes: Processes = operational(1, description="that check its rows; the job reserves as many CPUs")

    @property
    def makes(self) -> Role:
        return "dataset"

    @property
    def compares_overlap(self) -> bool:
        return self.on_overlap == "error"

    @property
    def draws(self) -> bool:
        return self.shuffle or bool(self.mix)

    @property
    def job_processes(self) -> int:
        return self.processes

    def most_rows(self, count: int) -> int:
        """Return how many of `count` rows remain after `limit` or `share`."""
        if self.share is not None:
            return max(1, round(self.share * count))
        return count if self.limit is None else min(count, self.limit)

    def unused_fields(self) -> frozenset[str]:
        return super().unused_fields() | (set() if self.mix else {"stop"})

    @model_validator(mode="after")
    def _a_limit_is_one_number(self) -> DatasetConfig:
        if self.share is not None and self.limit is not None:
            raise ValueError("share: `limit` says how many rows; leave one of them out")
        return self

    @model_validator(mode="after")
    def _what_stops_is_a_mix(self) -> DatasetConfig:
        if self.stop != "first_exhausted" and not self.mix:
            raise ValueError("stop: it says when a `mix` ends, and there is none; leave it out")
        return self

    @model_validator(mode="after")
    def _columns_are_read_once(self) -> DatasetConfig:
        taken = list(self.columns.values())
        twice = first_repeated(taken)
        if twice is not None:
            names = ", ".join(name for name, column in self.columns.items() if column == twice)
            raise ValueError(f"columns: `{twice}` is read as {names}: one column has one meaning")
        return self

    @model_validator(mode="after")
    def _rows_may_be_cut(self) -> DatasetConfig:
        problem = FORMATS[self.format].truncation_problem
        if self.on_long_row == "truncate" and problem:
            raise ValueError(f"on_long_row: {problem}; use error or drop")
        return self


class OverlapConfig(StageConfig):
    """A comparison with held-out data that the pipeline adds to each training dataset, before anything trains on it."""

    dataset: Annotated[str, Reads("dataset")] = Field(description="that is trained on")
    held_out: Annotated[tuple[str, ...], Reads("dataset")] = Field(description="that are validated or evaluated on")
