"""Rows of JSON in any layout: one row per line, a list of rows, or each row over many lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from rlhf_core.data.formats import Row, RowError
from rlhf_core.data.sources.opening import open_data, read_head
from rlhf_core.system.json_text import Decoder, JSONTextError, parse_json, wrong_at

# Its place; the row, its problem, or None if there is none (a blank line); bytes that were read.
Parsed = tuple[str, Row | RowError | None, int]

MAX_ROW_BYTES = 64 * 2**20
TOO_LONG = f"this row is longer than {MAX_ROW_BYTES // 2**20} MiB: is the file one row a line?"
NOT_UTF8 = "not UTF-8 text"
_CHUNK = 2**16
_NEAR_END = 16  # characters: where a value may be cut off, rather than wrong
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


def json_rows(path: str, shown: str) -> Iterator[Parsed]:
    """Yield the rows of a file. Raises RowError for one that cannot be split into rows."""
    head = read_head(path, shown).removeprefix(_BOM).lstrip()
    first_line, _, rest = head.partition(b"\n")
    # As everything writes it that indents JSON.
    over_many_lines = first_line.strip() == b"{" and rest.lstrip().startswith((b'"', b"}"))
    with open_data(path, shown) as file:
        if head.startswith(b"["):
            yield from _Values(file, shown).of_list()
        elif over_many_lines:
            yield from _Values(file, shown).one_after_the_other()
        else:
            yield from _lines(file, shown)


def _lines(file: IO[bytes], shown: str) -> Iterator[Parsed]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES):
        number += 1
        where = f"{shown} line {number}"
        if len(line) >= MAX_ROW_BYTES:
            raise RowError(f"{where}: {TOO_LONG}")
        content = (line.removeprefix(_BOM) if number == 1 else line).strip()
        yield where, _parsed_line(content) if content else None, len(line)


def _parsed_line(line: bytes) -> Row | RowError:
    try:
        return _row(parse_json(line.decode()))
    except UnicodeDecodeError as error:
        return RowError(f"{NOT_UTF8} ({error.reason} at byte {error.start} of the line)", NOT_UTF8)
    except JSONTextError as error:
        return RowError(str(error), error.reason)


def _row(value: Any) -> Row | RowError:
    if not isinstance(value, dict):
        return RowError(f"a row must be a JSON object, this is {type(value).__name__}", "not a JSON object")
    return value


class _Values:
    """JSON values of a file, read and decoded incrementally: never the whole file."""

    def __init__(self, file: IO[bytes], shown: str) -> None:
        self._file = file
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = Decoder()
        self._text = ""
        self._position = 0  # in _text, of the next value
        self._line = self._column = 1  # of _position
        self._ended = False

    def of_list(self) -> Iterator[Parsed]:
        self._take("[")
        index = 0
        if self._next() == "]":
            self._take("]")
        else:
            while True:
                yield f"{self._shown} row {index}", *self._value()
                index += 1
                if self._next() == "]":
                    self._take("]")
                    break
                self._take(",")
        if self._next():
            raise self._wrong("more text after the end of the list")

    def one_after_the_other(self) -> Iterator[Parsed]:
        while self._next():
            yield f"{self._shown} line {self._line}", *self._value()

    def _value(self) -> tuple[Row | RowError, int]:
        """Return the next value, and its size in characters."""
        self._next()
        while True:
            try:
                value, end = self._decoder.decode(self._text, self._position)
                if end < len(self._text) or self._ended:  # else a number could go on
                    break
            except JSONTextError as error:
                raise RowError(f"{self._shown} line {self._line}: {error}", error.reason) from error
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _NEAR_END
                if self._ended or not cut_off:
                    self._advance(error.pos)
                    raise self._wrong(error.msg) from error
            self._read_more()
        size = end - self._position
        self._advance(end)
        problem = self._decoder.problem
        return (_row(value) if problem is None else RowError(str(problem), problem.reason)), size

    def _next(self) -> str:
        """Return the next character that is no white space, now at `_position`; empty at the end of the file."""
        while True:
            rest = self._text[self._position : self._position + _CHUNK]
            space = len(rest) - len(rest.lstrip(_SPACE))
            self._advance(self._position + space)
            if space < len(rest):
                return rest[space]
            if self._position >= len(self._text):
                if self._ended:
                    return ""
                self._read_more()

    def _take(self, character: str) -> None:
        if self._next() != character:
            raise self._wrong(f"Expecting {character!r}")
        self._advance(self._position + 1)

    def _advance(self, position: int) -> None:
        passed = self._text[self._position : position]
        lines = passed.count("\n")
        self._line += lines
        self._column = len(passed) - passed.rfind("\n") if lines else self._column + len(passed)
        self._position = position

    def _read_more(self) -> None:
        """Read at least as much as is buffered, so that a long value is not decoded many times."""
        pending = self._text[self._position :]
        if len(pending) >= MAX_ROW_BYTES:
            raise RowError(f"{self._shown} line {self._line}: {TOO_LONG}")
        content = self._file.read(max(_CHUNK, len(pending)))
        self._ended = not content
        try:
            self._text = pending + self._utf8.decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            line = self._line + pending.count("\n") + error.object[: error.start].count(b"\n")
            raise RowError(f"{self._shown} line {line}: {NOT_UTF8} ({error.reason})") from error
        self._position = 0

    def _wrong(self, reason: str) -> RowError:
        place = f"{self._shown} line {self._line}"
        return RowError(f"{place}: not JSON {wrong_at(self._text, self._position, reason, self._column)}", "not JSON")
