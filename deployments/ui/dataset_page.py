"""A dataset as its page shows it: how many rows were kept and why others were not, what it was compared with, rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field

from deployments.ui.reading import StoreReader
from deployments.ui.row_fields import RowView, row_view
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import Kind, Manifest, MetricValue
from rlhf_core.config.base import Config
from rlhf_core.data.reading import DATA_FILE, INFO_FILE
from rlhf_core.errors import IntegrityError
from rlhf_core.pipeline.run_view import Run
from rlhf_core.report.node_view import NodeView
from rlhf_core.stages.table import STAGES

MOST_ROWS = 20  # of a page
_MOST_CHARACTERS = 6_000  # of a row among others
_MOST_CHARACTERS_ALONE = 500_000
_STAGE = "dataset"  # the only one whose info file counts its own rows
_REASONS = {
    "bad_rows": "bad: not readable, or a field is missing or wrong",
    "excluded": "their prompt is in a dataset that is excluded",
    "duplicates": "the same as an earlier row",
    "near_duplicates": "nearly the same as an earlier row, or as an excluded prompt",
    "not_drawn": "left over when the mix stopped",
    "over_limit": "beyond the limit",
}


class _Info(Config):
    """A part of the info file, whose other fields are left out."""

    model_config = ConfigDict(extra="ignore")


class SourceInfo(_Info):
    source: dict[str, Any]
    read: int
    used: int
    repeated: int = 0


class BadRowsInfo(_Info):
    rows: int = 0
    reasons: dict[str, int] = Field(default_factory=dict)
    examples: tuple[str, ...] = ()


class NearDuplicatesInfo(_Info):
    policy: str = "off"
    threshold: float = 0.0
    rows: int = 0
    near_excluded: int = 0
    examples: tuple[dict[str, str], ...] = ()


class DatasetInfo(_Info):
    format: str = ""
    sources: tuple[SourceInfo, ...] = ()
    dropped: dict[str, int] = Field(default_factory=dict)
    bad_rows: BadRowsInfo = BadRowsInfo()
    near_duplicates: NearDuplicatesInfo = NearDuplicatesInfo()
    tasks: dict[str, int] = Field(default_factory=dict)

    @property
    def read(self) -> int:
        return sum(source.read for source in self.sources) + self.bad_rows.rows

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """The reasons that rows were dropped for, with their counts."""
        return [(_REASONS.get(name, name.replace("_", " ")), rows) for name, rows in self.dropped.items()]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A comparison of a dataset that is trained on with held-out ones, of which this dataset is one."""

    node: NodeView
    trained: str  # the names of the stages
    held_out: Sequence[str]


@dataclass(frozen=True, slots=True)
class RowsPage:
    start: int
    size: int
    rows: Sequence[RowView]
    problem: str = ""  # why none is shown

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class DatasetView:
    info: DatasetInfo
    rows: int | None  # by its manifest
    made_of_sources: bool  # and not of another dataset
    metrics: Mapping[str, MetricValue]
    excluded: Mapping[str, str]  # the names of excluded datasets, and of their stages
    overlaps: Sequence[Overlap]
    readers: Sequence[tuple[NodeView, str, Mapping[str, MetricValue]]]  # with the name of the input, and counts of rows
    page: RowsPage

    @property
    def dropped(self) -> int:
        return sum(self.info.dropped.values())

    @property
    def last_start(self) -> int:
        """The row that the last page begins with."""
        return max(0, ((self.rows or 0) - 1) // MOST_ROWS * MOST_ROWS)


@dataclass(frozen=True, slots=True)
class ListedDataset:
    manifest: Manifest
    runs: int  # that have it

    @property
    def rows(self) -> int | None:
        rows = self.manifest.metrics.get("rows")
        return rows if isinstance(rows, int) else None


def read_datasets(reader: StoreReader) -> list[ListedDataset]:
    """Return the datasets of the store's runs, the newest first."""
    made_by = {name for name, stage in STAGES.items() if Kind.DATASET in stage.writes}
    runs = Counter(ref for run in reader.runs() for ref in set(run.nodes.values()) if ref.stage in made_by)
    listed = [
        ListedDataset(manifest, runs[manifest.ref])
        for manifest in reader.manifests(runs)
        if manifest.kind == Kind.DATASET
    ]
    return sorted(listed, key=lambda each: each.manifest.finished_at, reverse=True)


def read_dataset_view(reader: StoreReader, run: Run, node: NodeView, start: int, count: int) -> DatasetView:
    """Return the dataset that a stage has made, with `count` of its rows from the row `start`; alone, a row is whole.

    Raises IntegrityError for a damaged info file.
    """
    manifest = node.manifest
    assert manifest is not None
    data = reader.file(node, INFO_FILE)
    where = f"{node.ref}: {INFO_FILE}"
    info = DatasetInfo() if data is None else parsed(DatasetInfo, data, where, "the info file of a dataset")
    nodes = reader.nodes(run)
    names = {each.ref: each.name for each in nodes}
    inputs = reader.inputs(nodes)
    overlaps = [
        Overlap(
            each, names.get(of["dataset"], str(of["dataset"])),
            [names.get(ref, str(ref)) for role, ref in sorted(of.items()) if role != "dataset"],
        )
        for each in nodes
        if each.ref.stage == "overlap" and node.ref in (of := inputs[each.name]).values()
    ]  # fmt: skip
    readers = [
        (each, role, _counts(each.manifest))
        for each in nodes
        if each.ref.stage != "overlap"
        for role, ref in inputs[each.name].items()
        if ref == node.ref
    ]
    rows = manifest.metrics.get("rows")
    return DatasetView(
        info, rows if isinstance(rows, int) else None, made_of_sources=manifest.stage == _STAGE,
        metrics=manifest.metrics, overlaps=overlaps, readers=readers, page=_page(reader, manifest, start, count),
        excluded={
            role.removeprefix("exclude."): names.get(ref, "")
            for role, ref in manifest.parents.items()
            if role.startswith("exclude.")
        },
    )  # fmt: skip


def _page(reader: StoreReader, manifest: Manifest, start: int, count: int) -> RowsPage:
    file = next((each for each in manifest.files if each.path == DATA_FILE), None)
    if file is None:
        return RowsPage(start, count, (), f"it has no {DATA_FILE}: an earlier release made it, or it is damaged")
    try:
        stored = reader.rows.read(file, start, count)
    except IntegrityError as error:  # what else is known of the dataset is worth a page
        return RowsPage(start, count, (), str(error))
    most = _MOST_CHARACTERS_ALONE if count == 1 else _MOST_CHARACTERS
    return RowsPage(start, count, [row_view(row, most) for row in stored])


def _counts(manifest: Manifest | None) -> Mapping[str, MetricValue]:
    """Return how many rows a stage has read, and how many of them it has dropped or truncated."""
    metrics = {} if manifest is None else manifest.metrics
    kinds = ("rows_read", "rows_dropped", "rows_truncated")
    return {name: value for name, value in metrics.items() if any(kind in name for kind in kinds)}
