"""Rows of one data file, local or of any fsspec URL: json, jsonl, csv, parquet; compressed ones by their ending."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec

from rlhf_core.data.formats import Row, RowError

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zip")

BadRow = Callable[[str, RowError], None]  # is given the place of a row that cannot be read, and what is wrong with it
_Parsed = tuple[str, Row | RowError]  # where it is; the row, or what is wrong with it


def raise_bad_row(where: str, error: RowError) -> None:
    """The BadRow of `on_bad_row: error`."""
    raise error.at(where)


def iterate_file(path: str, shown: str, bad_row: BadRow = raise_bad_row) -> Iterator[tuple[str, Row]]:
    """Each row with its place, such as `data.jsonl line 3`.

    path: where to read it, a local path or a URL; shown: how the recipe names it, whose ending says the type.
    bad_row: is called for each row that cannot be read, which is then left out.
    Raises RowError for a file that cannot be divided into rows, or has none.
    """
    suffix = file_type(shown)
    empty = True
    try:
        for where, row in _parquet(path, shown) if suffix == ".parquet" else _text_file(path, shown, suffix):
            empty = False
            if isinstance(row, RowError):
                bad_row(where, row)
            else:
                yield where, row
    except FileNotFoundError as error:
        raise RowError(f"{shown}: there is no such file") from error
    except OSError as error:
        raise RowError(f"{shown}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise RowError(f"{shown}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if empty:
        raise RowError(f"{shown}: the file has no rows")


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


def _text_file(path: str, shown: str, suffix: str) -> Iterator[_Parsed]:
    if suffix == ".csv":
        with fsspec.open(path, "rt", encoding="utf-8-sig", newline="", compression=_compression(shown)) as file:
            yield from _csv(file, shown)
        return
    with fsspec.open(path, "rb", compression=_compression(shown)) as file:
        yield from (_json if suffix == ".json" else _json_lines)(file, shown)


def _compression(shown: str) -> str | None:
    # By the recipe's name: a local copy may be called otherwise.
    found = fsspec.utils.infer_compression(shown)
    return None if found is None else str(found)


def _json_lines(file: IO[bytes], shown: str) -> Iterator[_Parsed]:
    for number, line in enumerate(file, start=1):
        if content := line.strip():
            yield f"{shown} line {number}", _parsed_line(content, first=number == 1)


def _parsed_line(line: bytes, *, first: bool) -> Row | RowError:
    try:
        return _row(json.loads(line.decode("utf-8-sig" if first else "utf-8")))
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8 text ({error.reason} at byte {error.start} of the line)", "not UTF-8 text")
    except json.JSONDecodeError as error:
        return RowError(f"not JSON ({error.msg}, column {error.colno})", "not JSON")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        return RowError(f"not JSON that can be read ({error})", "not JSON")


def _json(file: IO[bytes], shown: str) -> Iterator[_Parsed]:
    """A list of rows; or, since many files named .json are such, one row a line."""
    start = file.read(3).removeprefix(b"\xef\xbb\xbf")
    while start.isspace() or not start:
        following = file.read(1)
        if not following:
            return
        start = following
    if not start.lstrip().startswith(b"["):
        file.seek(0)
        yield from _json_lines(file, shown)
        return
    file.seek(0)
    try:
        rows = json.loads(file.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise RowError(f"{shown} line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    yield from ((f"{shown} row {index}", _row(row)) for index, row in enumerate(rows))


def _row(value: Any) -> Row | RowError:
    if not isinstance(value, dict):
        return RowError(f"a row must be a JSON object, this is {type(value).__name__}", "not a JSON object")
    return value


def _csv(file: IO[str], shown: str) -> Iterator[_Parsed]:
    """Every value stays text: 007 is not 7."""
    reader = csv.DictReader(file, strict=True)
    wrong_width = "has not as many values as the header has columns"
    try:
        for row in reader:
            fits = None not in row and None not in row.values()
            yield f"{shown} line {reader.line_num}", dict(row) if fits else RowError(wrong_width)
    except csv.Error as error:
        # Where a quote is left open, the rest of the file may look like one row: no policy drops that.
        raise RowError(f"{shown} line {reader.reader.line_num}: not CSV ({error})") from error


def _parquet(path: str, shown: str) -> Iterator[_Parsed]:
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
