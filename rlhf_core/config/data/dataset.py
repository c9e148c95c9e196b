"""Settings of datasets. One entry of the recipe's `data` becomes one dataset artifact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Config, NamedFolder, Reads, Role, operational, since_default
from rlhf_core.config.data.format_table import FORMATS, known_format
from rlhf_core.config.data.sources import SourceConfig
from rlhf_core.config.numbers import (
    ImageBytes,
    ImagePixels,
    ImagesOfRow,
    PositiveShare,
    Processes,
    Rows,
    Similarity,
    Weight,
)
from rlhf_core.config.plugins import Plugin
from rlhf_core.config.stages.base import SeededConfig, StageConfig
from rlhf_core.config.texts import NonEmpty
from rlhf_core.system.listing import first_repeated

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # of the files of `images.folder`
# Treatment of incomplete rows, and of rows that are longer than a stage can read.
BadRowPolicy = Literal["error", "drop"]
LongRowPolicy = Literal["error", "drop", "truncate"]
OnOverlap = Literal["error", "allow"]
StoppingRule = Literal["first_exhausted", "all_exhausted"]


class WeightedSource(Config):
    source: SourceConfig = Field(description="source of its rows")
    weight: Weight = Field(default=1.0, description="share of the mix, relative to the others")


class ImagesConfig(Config):
    """Images of rows. They become files of the dataset's artifact, each kept once."""

    folder: NonEmpty | None = Field(
        default=None,
        description="folder of the image files, whose relative paths are in the rows; it may be an fsspec URL of a "
        "folder without subfolders; none: rows contain their images",
    )
    max_per_row: ImagesOfRow = Field(
        default=8, description="maximum number of images in a row; a row with more is a bad row"
    )
    max_bytes: ImageBytes = Field(
        default=20_000_000, description="maximum size of a file; a row with a larger one is a bad row"
    )
    max_pixels: ImagePixels = Field(
        default=40_000_000, description="maximum number of pixels of an image; a row with a larger one is a bad row"
    )

    def named_folders(self) -> Iterator[NamedFolder]:
        if self.folder is not None:
            yield NamedFolder(self.folder, IMAGE_SUFFIXES, "images")


class DatasetConfig(SeededConfig):
    format: Annotated[str, AfterValidator(known_format)] = Field(
        description="format of the rows, see Rows", json_schema_extra=lambda schema: schema.update(enum=[*FORMATS])
    )
    source: SourceConfig | None = Field(default=None, description="source of the rows")
    mix: tuple[WeightedSource, ...] = Field(
        default=(), description="several sources, drawn by weight, instead of `source`"
    )
    stop: StoppingRule = Field(
        default="first_exhausted",
        description="end of a mix: when the first source is exhausted, or when all are, with those that end earlier "
        "restarting",
    )
    columns: dict[str, str] = Field(
        default={}, description="canonical column -> the source's column, or a field of one: `column.field`"
    )
    images: ImagesConfig = since_default(
        ImagesConfig(),
        description="images of rows of the formats `conversations`, `prompts`, `preferences` and `unpaired`",
    )
    limit: Rows | None = Field(default=None, description="maximum number of rows; none: all")
    share: PositiveShare | None = Field(
        default=None,
        description="share of the rows, chosen as by `limit`; another dataset with `exclude` gets the rest",
    )
    exclude: Annotated[tuple[str, ...], Reads("dataset")] = Field(
        default=(), description="datasets whose prompts must not occur here; rows with them are dropped"
    )
    on_overlap: OnOverlap = operational(
        "error", description="treatment of training rows with a prompt that the recipe validates or evaluates on"
    )
    on_bad_row: BadRowPolicy = Field(
        default="error",
        description="treatment of rows that cannot be read, lack a field of their format, or cannot be rendered by "
        "the chat template of the stage that reads them",
    )
    on_long_row: LongRowPolicy = Field(
        default="error",
        description="treatment of rows longer than the maximum of the stage that reads them; `truncate`: cut at the "
        "end, not for prompts; pre-training splits its documents unless this is `drop` or `truncate`",
    )
    drop_duplicates: bool = Field(default=True, description="drop rows that repeat an earlier one")
    near_duplicates: Literal["count", "drop", "off"] = Field(
        default="count",
        description="treatment of near-duplicates of earlier rows, and of rows with nearly an excluded prompt",
    )
    near_duplicate_threshold: Similarity = Field(
        default=0.8,
        description="minimum similarity of near-duplicates: the share of all sequences of five words in common",
    )
    shuffle: bool = Field(default=True, description="shuffle the rows by the seed")

    processes: Processes = operational(1, description="processes that check its rows; the job reserves as many CPUs")

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

    def named_plugins(self) -> Iterable[Plugin]:
        plugin = FORMATS.plugins.get(self.format)
        return () if plugin is None else (plugin,)

    @model_validator(mode="after")
    def _a_limit_is_one_number(self) -> DatasetConfig:
        if self.share is not None and self.limit is not None:
            raise ValueError("share: `limit` sets the number of rows too; remove one of them")
        return self

    @model_validator(mode="after")
    def _stop_needs_a_mix(self) -> DatasetConfig:
        if self.stop != "first_exhausted" and not self.mix:
            raise ValueError("stop: it applies only to a `mix`; remove it")
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

    dataset: Annotated[str, Reads("dataset")] = Field(description="training dataset")
    held_out: Annotated[tuple[str, ...], Reads("dataset")] = Field(description="validation and evaluation datasets")
