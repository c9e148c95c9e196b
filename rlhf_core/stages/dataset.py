"""One entry of the recipe's `data` as one dataset artifact. Imports no torch: dataset jobs start fast."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.data.sources import SourceConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.bad_rows import BadRows
from rlhf_core.data.checking import Bad, CheckedBatch, Checker, Located
from rlhf_core.data.formats import RowError, format_of, normalised
from rlhf_core.data.images import ImageReader
from rlhf_core.data.kept import KeptRow, KeptRows, iterate, ordered
from rlhf_core.data.near_duplicates import SketchFile, similar_earlier
from rlhf_core.data.overlap import PromptIndex
from rlhf_core.data.reading import read_dataset, write_info, write_rows
from rlhf_core.data.sources.base import open_source
from rlhf_core.errors import StageError, shortened
from rlhf_core.processes.in_order import in_order
from rlhf_core.stages.dataset_images import move_images, open_reader

if TYPE_CHECKING:
    from datasets import Dataset

_CHECKED_AT_ONCE = 256  # rows
_BATCHES_OF_PROGRESS = 8
_NEAR_EXAMPLES = 3
_SHOWN_CHARACTERS = 200


@dataclass
class _Counts:
    read: list[int] = field(default_factory=list)  # by source, without bad rows
    bad: BadRows = field(default_factory=BadRows)
    excluded: int = 0
    duplicates: int = 0
    near_duplicates: int = 0  # that resemble an earlier row
    near_excluded: int = 0  # that ask nearly an excluded prompt
    near_examples: list[dict[str, str]] = field(default_factory=list)
    near_dropped: int = 0
    not_drawn: int = 0  # left over when the mix stopped
    over_limit: int = 0


def run(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Read, check, drop excluded and repeated rows, mix, shuffle, limit.

    inputs: `exclude.NAME`, datasets whose prompts are dropped.
    Raises StageError that names an invalid row, or the reason if nothing is left.
    """
    sources = _sources(config)
    folder, work = context.workdir / "dataset", context.workdir / "rows"
    work.mkdir()
    counts = _Counts()
    images = open_reader(config, context, work / "images")
    selection = _Selection(config, inputs, context, work, images, counts)
    with selection.kept:
        for number, source in enumerate(sources):
            selection.read(source, number)
    kept = selection.of_sources()
    rows = _drawn(config, kept, context, counts)
    summary = _Summary(len(sources))
    write_rows(folder, summary.of(iterate(rows)))
    image_counts = move_images(work / "images", folder)
    write_info(folder, {**_info(config, summary, list(map(len, kept)), counts), **image_counts})
    shutil.rmtree(work)
    # Not logged: one line is no curve, and starting the trackers would take longer than most datasets.
    return Output(Kind.DATASET, folder, {**_metrics(config, summary, counts), **image_counts})


class _Selection:
    """Reads sources one after another and selects rows, which are buffered on disk."""

    def __init__(
        self,
        config: DatasetConfig,
        inputs: Mapping[str, Input],
        context: StageContext,
        work: Path,
        images: ImageReader,
        counts: _Counts,
    ) -> None:
        self._config, self._context, self._counts = config, context, counts
        excluded = PromptIndex({name: read_dataset(dataset.folder) for name, dataset in inputs.items()})
        self._checker = Checker(config, excluded, images)
        self._seen: set[int] = set()
        self._sketches = SketchFile(work / "sketches")
        self._near_prompt: list[NDArray[np.bool_]] = []  # of the rows that are kept
        self.kept = KeptRows(work / "rows.arrow", len(_sources(config)))

    def read(self, source: SourceConfig, number: int) -> None:
        """Keep the source's rows, in their order."""
        self._counts.read.append(0)
        most = self._config.limit if source.streams else None
        batches = _batches(source, self._config, self._context)
        try:
            with closing(in_order(self._checker, batches, self._config.processes)) as checked:
                for count, batch in enumerate(checked, 1):
                    self._keep(batch, number, most)
                    if count % _BATCHES_OF_PROGRESS == 0:
                        self._context.progress(sum(self._counts.read), 0, "reading", kept=sum(self.kept.counts))
                    if self.kept.counts[number] == most:
                        break
        except RowError as error:
            raise StageError(f"{self._context.name}: {error}") from error
        if source.streams:
            open_source(source).require_as_planned(self._context)

    def _keep(self, batch: CheckedBatch, source: int, most: int | None) -> None:
        """Keep rows of a batch. most: limit of the source."""
        counts = self._counts
        kept: list[int] = []  # in the batch's sketches
        checked = 0
        for row in batch.rows:
            if self.kept.counts[source] == most:
                break
            if isinstance(row, Bad):
                counts.bad(row.where, row.error)
                continue
            counts.read[source] += 1
            if row is None:
                counts.excluded += 1
                continue
            checked += 1
            if self._config.drop_duplicates and row.key in self._seen:
                counts.duplicates += 1
                continue
            if self._config.drop_duplicates:
                self._seen.add(row.key)
            self.kept.append(row, source)
            kept.append(checked - 1)
        if counts.bad.count and self._config.on_bad_row == "error":
            raise StageError(f"{self._context.name}: {counts.bad.problem(sum(counts.read) + counts.bad.count)}")
        if batch.sketches is not None and batch.near_prompt is not None:
            self._sketches.append(batch.sketches[kept])
            self._near_prompt.append(batch.near_prompt[kept])

    def of_sources(self) -> list[Dataset]:
        """Return the rows of each source, after all were read, without near-duplicates if these are dropped."""
        counts = self._counts
        self._seen.clear()  # its memory is needed for the order
        if not self._near_prompt:
            return self.kept.of_sources(None)
        self._context.progress(sum(counts.read), 0, "comparing")
        earlier = similar_earlier(self._sketches.read(), self._config.near_duplicate_threshold)
        near_prompt = np.concatenate(self._near_prompt)
        repeats = earlier >= 0
        counts.near_duplicates, counts.near_excluded = int(repeats.sum()), int(near_prompt.sum())
        text = format_of(self._config.format).whole_text
        for index in repeats.nonzero()[0][:_NEAR_EXAMPLES]:
            row, resembled = (_shown(text(row)) for row in self.kept.rows([int(index), int(earlier[index])]))
            counts.near_examples.append({"row": row, "resembles": resembled})
        if self._config.near_duplicates != "drop":
            return self.kept.of_sources(None)
        dropped = repeats | near_prompt
        counts.near_dropped = int(dropped.sum())
        return self.kept.of_sources(dropped)


def _batches(source: SourceConfig, config: DatasetConfig, context: StageContext) -> Iterator[list[Located]]:
    """Yield the source's rows, with unreadable ones in their places. Errors are raised after the rows before."""
    batch: list[Located] = []

    def unreadable(where: str, error: RowError) -> None:
        batch.append((where, error))
        if config.on_bad_row == "error" and len(batch) >= _CHECKED_AT_ONCE:
            raise error  # the error of the batch comes first

    try:
        for where, raw in open_source(source).rows(context, config.format, unreadable):
            batch.append((where, raw))
            if len(batch) >= _CHECKED_AT_ONCE:
                yield batch[:]
                batch.clear()
    except (RowError, StageError):
        yield batch
        raise
    yield batch


def _drawn(config: DatasetConfig, sources: list[Dataset], context: StageContext, counts: _Counts) -> Dataset:
    """Return the rows of the result, in their final order."""
    kept = sum(map(len, sources))
    if not (sum(counts.read) or counts.bad.count):
        raise StageError(f"{context.name}: there is no row in what it reads")
    if not kept:
        raise StageError(f"{context.name}: no row is left of {sum(counts.read)} read: {_reasons(config, counts)}")
    try:
        rows = ordered(config, sources, context.seed)
    except StageError as error:
        raise StageError(f"{context.name}: {error}") from error
    counts.not_drawn = max(0, kept - len(rows))
    limited = rows.take(config.most_rows(len(rows)))
    counts.over_limit = len(rows) - len(limited)
    return limited


class _Summary:
    """Statistics of the rows for the info file, collected while they are written."""

    def __init__(self, sources: int) -> None:
        self.rows = 0
        self.tasks: dict[str, int] = {}
        self.used = [0] * sources
        self._ids = hashlib.sha256()

    def of(self, rows: Iterator[KeptRow]) -> Iterator[tuple[str, str]]:
        for row in rows:
            self._ids.update((f"\n{row.id}" if self.rows else row.id).encode())
            self.rows += 1
            self.used[row.source] += 1
            if row.task is not None:
                self.tasks[row.task] = self.tasks.get(row.task, 0) + 1
            yield row.id, row.text

    @property
    def ids_sha256(self) -> str:
        return self._ids.hexdigest()


def _dropped(counts: _Counts) -> dict[str, int]:
    return {
        "bad_rows": counts.bad.count,
        "excluded": counts.excluded,
        "duplicates": counts.duplicates,
        "near_duplicates": counts.near_dropped,
        "not_drawn": counts.not_drawn,
        "over_limit": counts.over_limit,
    }


def _reasons(config: DatasetConfig, counts: _Counts) -> str:
    """Return the numbers of dropped rows by reason, for the error that none is left."""
    dropped = _dropped(counts)
    return (
        f"{dropped['excluded']} occur in {', '.join(config.exclude) or 'excluded datasets'}, "
        f"{dropped['duplicates']} are duplicates, "
        f"{dropped['near_duplicates']} near-duplicates, {dropped['not_drawn']} were not drawn by the mix; "
        f"{dropped['bad_rows']} bad rows are not counted as read"
    )


def _metrics(config: DatasetConfig, summary: _Summary, counts: _Counts) -> dict[str, int]:
    metrics = {
        "rows": summary.rows,
        "read": sum(counts.read),
        "excluded": counts.excluded,
        "duplicates": counts.duplicates,
        "bad_rows": counts.bad.count,
    }
    if config.near_duplicates == "off":
        return metrics
    return metrics | {"near_duplicates": counts.near_duplicates, "near_excluded": counts.near_excluded}


def _info(config: DatasetConfig, summary: _Summary, kept: list[int], counts: _Counts) -> dict[str, Any]:
    return {
        "format": config.format,
        "rows": summary.rows,
        # For the stages that read it, which alone know its rows' lengths, and a chat template.
        "on_long_row": config.on_long_row,
        "on_bad_row": config.on_bad_row,
        "sources": [
            {"source": source.model_dump(mode="json"), "read": read, "used": used, "repeated": max(0, used - distinct)}
            for source, read, distinct, used in zip(_sources(config), counts.read, kept, summary.used, strict=True)
        ],
        "dropped": _dropped(counts),
        "bad_rows": counts.bad.info(),
        "near_duplicates": {
            "policy": config.near_duplicates,
            "threshold": config.near_duplicate_threshold,
            "rows": counts.near_duplicates,
            "near_excluded": counts.near_excluded,
            "examples": counts.near_examples,
        },
        "tasks": summary.tasks,
        "rows_sha256": summary.ids_sha256,
    }


def _shown(text: str) -> str:
    return shortened(normalised(text), _SHOWN_CHARACTERS)


def _sources(config: DatasetConfig) -> list[SourceConfig]:
    if config.source is None and not config.mix:
        raise StageError("this dataset names no `source` and no `mix`; give it one of them")
    return [entry.source for entry in config.mix] if config.source is None else [config.source]
