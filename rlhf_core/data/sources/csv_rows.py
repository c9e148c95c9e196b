"""Rows of CSV and TSV: a header, then one row per line; in quotes a value may contain separators and line ends."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO

from rlhf_core.config.texts import is_unicode
from rlhf_core.data.formats import Row, RowError
from rlhf_core.data.sources.json_rows import MAX_ROW_BYTES, NOT_UTF8, TOO_LONG, Parsed
from rlhf_core.data.sources.opening import compression_of, open_data, read_head
from rlhf_core.system.listing import first_repeated

_OTHER_DELIMITER = "divide values by commas, in .tsv by tabs"


def csv_rows(path: str, shown: str) -> Iterator[Parsed]:
    """Yield rows whose values stay text: 007 is not 7. Raises RowError for a file that cannot be split into rows."""
    read_head(path, shown)
    name = shown[: len(shown) - len(compression_of(shown))].lower()
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    with open_data(path, shown) as file:
        # Bytes that are no UTF-8 become halves of surrogate pairs, so that they are noticed in their row.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = _Lines(text, shown)
        reader = csv.reader(lines, strict=True, delimiter="\t" if name.endswith(".tsv") else ",")
        others = ";|," if name.endswith(".tsv") else ";|\t"
        try:
            yield from _rows(reader, lines, shown, others)
        except csv.Error as error:
            delimiter = next((other for other in others if lines.begin == 1 and f'"{other}' in lines.last), None)
            if delimiter is not None:
                raise RowError(f"{shown} line 1: {_OTHER_DELIMITER}, not {delimiter!r}") from error
            # Where a quote is left open, the rest of the file may look like one row: no policy drops that.
            raise RowError(
                f"{shown} line {lines.begin}: not CSV ({error}): is a quote left open here? Inside of a quoted value "
                "it is written twice"
            ) from error


class _Lines:
    """Lines of bounded length, with their number."""

    def __init__(self, text: IO[str], shown: str) -> None:
        self._text = text
        self._shown = shown
        self.number = 0
        self.begin = 1  # of the row that is read now
        self.size = 0  # characters, since `next_row`
        self.last = ""

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline(MAX_ROW_BYTES):
            self.number += 1
            self.last = line
            self.size += len(line)
            if self.size >= MAX_ROW_BYTES:
                raise RowError(f"{self._shown} line {self.begin}: {TOO_LONG}")
            yield line

    def next_row(self) -> None:
        self.begin = self.number + 1
        self.size = 0


def _rows(reader: Iterator[list[str]], lines: _Lines, shown: str, other_delimiters: str) -> Iterator[Parsed]:
    header: list[str] | None = None
    for values in reader:
        where, size = f"{shown} line {lines.begin}", lines.size
        lines.next_row()
        if not values:
            yield where, None, size
        elif header is None:
            header = _header(values, where, other_delimiters)
        else:
            yield where, _row(header, values), size


def _header(names: list[str], where: str, other_delimiters: str) -> list[str]:
    if not is_unicode("".join(names)):
        raise RowError(f"{where}: {NOT_UTF8}")
    if names[0].startswith(('{"', "[{")):
        raise RowError(f"{where}: the file holds JSON: let its name end in .jsonl")
    delimiter = next((character for character in other_delimiters if character in names[0]), None)
    if len(names) == 1 and delimiter is not None:
        raise RowError(f"{where}: the header is one column, {names[0]!r}: {_OTHER_DELIMITER}, not {delimiter!r}")
    twice = first_repeated(names)
    if twice is not None:
        raise RowError(f"{where}: the header names the column `{twice}` twice: rename one of them")
    return names


def _row(header: list[str], values: list[str]) -> Row | RowError:
    if len(values) != len(header):
        reason = "has not as many values as the header has columns"
        return RowError(f"{reason} ({len(values)}, not {len(header)})", reason)
    if not is_unicode("".join(values)):
        return RowError(NOT_UTF8)
    return dict(zip(header, values, strict=True))
