"""The rows that a dataset keeps, on disk while they are selected: ordered, mixed and limited by the `datasets` library.

The library keeps the order as row indices, 8 bytes each, beside memory-mapped files; rows move when the result is
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.data.arrow_file import ArrowWriter
from rlhf_core.data.checking import Checked
from rlhf_core.errors import StageError

if TYPE_CHECKING:
    from datasets import Dataset

_READ_AT_ONCE = 256  # rows
_MOST_REPEATS = 10  # of a row, on average, where small sources are repeated


class KeptRow(NamedTuple):
    id: str
    text: str  # the row as JSON
    task: str | None
    source: int


class KeptRows:
    """Rows of one source after another. Written within its context; readable after it, while the file exists."""

    def __init__(self, path: Path, sources: int) -> None:
        import pyarrow as pa

        self._path = path
        self.counts = [0] * sources
        columns = {"id": pa.string(), "text": pa.large_string(), "task": pa.string(), "source": pa.int32()}
        self._writer = ArrowWriter(path, pa.schema(columns))

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, traceback)

    def append(self, row: Checked, source: int) -> None:
        kept = KeptRow(row.id, row.text, row.task, source)
        self._writer.append(kept._asdict(), len(row.text))
        self.counts[source] += 1

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the canonical rows with these indices, counted over all sources."""
        return [json.loads(row.text) for row in iterate(self._whole().select(indices))]

    def of_sources(self, dropped: NDArray[np.bool_] | None) -> list[Dataset]:
        """Return the rows of each source without those that are `dropped`, which has one value per row."""
        whole, start, sources = self._whole(), 0, []
        for count in self.counts:
            end = start + count
            of_source = whole.select(range(start, end) if count else [])
            if dropped is not None:
                of_source = of_source.select(np.flatnonzero(~dropped[start:end]))
            sources.append(of_source)
            start = end
        return sources

    def _whole(self) -> Dataset:
        from datasets import Dataset

        return Dataset.from_file(str(self._path))


def ordered(config: DatasetConfig, sources: Sequence[Dataset], seed: int) -> Dataset:
    """Return all rows drawn by the settings, in order, without a limit.

    Each source is shuffled by itself. With several, each row comes from a source drawn by weight, until the first is
    exhausted (`first_exhausted`), or all are (`all_exhausted`: those that end earlier restart).
    Raises StageError if a source of a mix has no row, or would be repeated too often.
    """
    if config.shuffle:
        sources = [
            rows.shuffle(generator=np.random.default_rng([seed, index]), keep_in_memory=True)
            for index, rows in enumerate(sources)
        ]
    if not config.mix:
        return sources[0]
    from datasets import interleave_datasets

    if problem := mix_problem(config, [len(rows) for rows in sources]):
        raise StageError(problem)
    shares = _shares(config)
    return interleave_datasets(list(sources), probabilities=shares.tolist(), seed=seed, stopping_strategy=config.stop)


def mix_problem(config: DatasetConfig, rows: Sequence[int]) -> str | None:
    """Return the reason why sources with so many remaining rows cannot be mixed; None if they can."""
    counts = np.array(rows)
    if not counts.all():
        return f"mix[{int(np.argmin(counts))}]: no row of this source is left"
    draws = float((counts / _shares(config)).max())
    if config.stop == "first_exhausted" or draws <= _MOST_REPEATS * counts.sum():
        return None
    return (
        f"stop: about {draws:.2g} rows would be drawn of {counts.sum()} until every source has given all of its "
        "rows: raise the weight of the source that has most rows for its weight, or set `stop: first_exhausted`"
    )


def _shares(config: DatasetConfig) -> NDArray[np.float64]:
    """Return each source's share of the mix, (sources,)."""
    weights = np.array([entry.weight for entry in config.mix], dtype=np.float64)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def iterate(rows: Dataset) -> Iterator[KeptRow]:
    """Yield the rows of KeptRows in the order of the library's dataset."""
    for table in rows.with_format("arrow").iter(_READ_AT_ONCE):
        yield from map(KeptRow, *(table.column(name).to_pylist() for name in KeptRow._fields))
