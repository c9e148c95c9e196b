"""Rows of one data file, local or of any fsspec URL: json, jsonl, csv, parquet; compressed ones by their ending."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec

from rlhf_core.data.formats import Row, RowError

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zip")


def iterate_file(path: str, shown: str) -> Iterator[tuple[str, Row]]:
    """Each row with its place, such as `data.jsonl line 3`.

    path: where to read it, a local path or a URL; shown: how the recipe names it, whose ending says the type.
    Raises RowError that says what is wrong in which line; an empty file is an error too.
    """
    suffix = file_type(shown)
    rows = _parquet(path, shown) if suffix == ".parquet" else _text_file(path, shown, suffix)
    try:
        first = next(rows, None)
    except FileNotFoundError as error:
        raise RowError(f"{shown}: there is no such file") from error
    except OSError as error:
        raise RowError(f"{shown}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise RowError(f"{shown}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if first is None:
        raise RowError(f"{shown}: the file has no rows")
    yield from chain([first], rows)


def file_type(shown: str) -> str:
    """The ending that says how a file is read. Raises RowError for one that is not known."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(shown).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in SUFFIXES:
        raise RowError(
            f"{shown}: files must end in {', '.join(SUFFIXES)}, or one of these and {', '.join(_COMPRESSIONS)}"
        )
    return suffixes[-1]


def _text_file(path: str, shown: str, suffix: str) -> Iterator[tuple[str, Row]]:
    with fsspec.open(path, "rt", encoding="utf-8-sig", newline="", compression=_compression(shown)) as file:
        if suffix == ".csv":
            yield from _csv(file, shown)
        elif suffix == ".json":
            yield from _json(file, shown)
        else:
            yield from _json_lines(file, shown)


def _compression(shown: str) -> str | None:
    # By the recipe's name: a local copy may be called otherwise.
    found = fsspec.utils.infer_compression(shown)
    return None if found is None else str(found)


def _json_lines(file: IO[str], shown: str) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{shown} line {number}"
            yield where, _row(_parse(line, where), where)


def _json(file: IO[str], shown: str) -> Iterator[tuple[str, Row]]:
    """A list of rows; or, since many files named .json are such, one row a line."""
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    if start != "[":
        file.seek(0)
        yield from _json_lines(file, shown)
        return
    file.seek(0)
    text = file.read()
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"{shown} line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    for index, row in enumerate(rows):
        where = f"{shown} row {index}"
        yield where, _row(row, where)


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise RowError(f"{where}: a row must be a JSON object, this is {type(value).__name__}")
    return value


def _csv(file: IO[str], shown: str) -> Iterator[tuple[str, Row]]:
    """Every value stays text: 007 is not 7."""
    reader = csv.DictReader(file, strict=True)
    try:
        for row in reader:
            where = f"{shown} line {reader.line_num}"
            if None in row or None in row.values():
                raise RowError(f"{where}: has not as many values as the header has columns")
            yield where, dict(row)
    except csv.Error as error:
        raise RowError(f"{shown} line {reader.line_num}: not CSV ({error})") from error


def _parquet(path: str, shown: str) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with fsspec.open(path, "rb") as file:
        try:
            index = 0
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{shown} row {index}", row
                    index += 1
        except pa.ArrowInvalid as error:
            raise RowError(f"{shown}: not a parquet file ({error})") from error
