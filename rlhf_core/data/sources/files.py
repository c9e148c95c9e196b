"""Rows of one data file, local or of any fsspec URL, in the format of its suffix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.base import BadRow, Located, raise_bad_row
from rlhf_core.data.sources.csv_rows import csv_rows
from rlhf_core.data.sources.json_rows import json_rows
from rlhf_core.data.sources.opening import COMPRESSIONS, compression_of
from rlhf_core.data.sources.parquet_rows import parquet_rows

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


@dataclass
class Budget:
    """The rows and bytes that may still be read of a sampled file."""

    num_bytes: int  # decompressed

    @property
    def spent(self) -> bool:
        return self.num_bytes <= 0


def iterate_file(
    path: str, shown: str, bad_row: BadRow = raise_bad_row, budget: Budget | None = None
) -> Iterator[Located]:
    """Yield each row with its place, such as `data.jsonl line 3`.

    path: a local path or a URL; shown: its name in the recipe, whose suffix is the type.
    bad_row: is called for each row that cannot be read, which is then skipped.
    budget: is reduced by what is read, and rows end when it is spent; none: all rows.
    Raises RowError for a file that cannot be split into rows, or has none.
    """
    empty = True
    for where, row, num_bytes in _READERS[file_type(shown)](path, shown):
        if row is not None:
            empty = False
        if isinstance(row, RowError):
            bad_row(where, row)
        elif row is not None:
            yield where, row
        if budget is not None:
            budget.num_bytes -= num_bytes
            if budget.spent:
                return
    if empty:
        raise RowError(f"{shown}: the file has no rows")


def file_type(shown: str) -> str:
    """Return the suffix that determines the format of a file. Raises RowError for an unknown one."""
    compression = compression_of(shown)
    suffix = PurePosixPath(shown[: len(shown) - len(compression)]).suffix.lower()
    if suffix not in SUFFIXES:
        raise RowError(
            f"{shown}: files must end in {', '.join(SUFFIXES)}, or one of these and {', '.join(COMPRESSIONS)}"
        )
    if suffix == ".parquet" and compression:
        raise RowError(f"{shown}: parquet is compressed inside of the file: unpack it")
    return suffix


_READERS = {
    ".json": json_rows,
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}
