"""Strict JSON: duplicate keys, NaN and infinity, which Python's reader accepts, are errors."""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.system.listing import first_repeated

_SHOWN = 20  # characters


class JSONTextError(ValueError):
    """The text of the error. reason: the same without the parts that are specific to this JSON text."""

    def __init__(self, message: str, reason: str = "not JSON") -> None:
        super().__init__(message)
        self.reason = reason


class Decoder:
    """Reads one value after the other out of a text."""

    def __init__(self) -> None:
        self.problem: JSONTextError | None = None  # of the value decoded last: it has an end, but not one meaning
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def decode(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and its end.

        Raises json.JSONDecodeError, with the position; JSONTextError for values that no reader should have to parse.
        """
        self.problem = None
        try:
            return self._decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            raise
        except RecursionError as error:
            raise JSONTextError("not JSON that can be read: thousands of lists inside each other") from error
        except ValueError as error:
            raise JSONTextError("not JSON that can be read: a number of thousands of digits") from error

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice = first_repeated([name for name, _ in pairs])
            self.problem = JSONTextError(f"the key `{twice}` occurs twice in one object", "a key occurs twice")
        return members

    def _constant(self, name: str) -> None:
        self.problem = JSONTextError(
            f"{name} is not valid JSON: write a number, or null", "NaN or infinity is not valid JSON"
        )


def wrong_at(text: str, position: int, reason: str, column: int) -> str:
    """Describe a JSON error: position, text there, remedy for the usual mistakes."""
    before, rest = text[max(0, position - _SHOWN) : position].rstrip(), text[position : position + _SHOWN].lstrip(" ")
    if not rest.strip() or reason.startswith("Unterminated"):
        return f"({reason}, column {column}): is it cut off?"
    excerpt = rest.splitlines()[0] or rest[0]
    if rest.startswith("'"):
        remedy = ": write double quotes"
    elif rest[0] in "}]" and reason.startswith(("Expecting value", "Expecting property", "Illegal trailing comma")):
        remedy = ": a comma before it is too much, or a value is missing"
    elif rest.startswith(("\r", ",", "{")) and before.endswith("}"):
        remedy = ": begin each row on a line of its own, ended by a line feed, without commas between"
    else:
        remedy = ""
    return f"({reason}, column {column}: {excerpt!r}){remedy}"


def parse_json(text: str) -> Any:
    """Parse the whole text as one value. Raises JSONTextError."""
    decoder = Decoder()
    content = text.strip(" \t\r\n")
    try:
        value, end = decoder.decode(content, 0)
    except json.JSONDecodeError as error:
        raise JSONTextError(f"not JSON {wrong_at(content, error.pos, error.msg, error.colno)}") from error
    if end != len(content):
        raise JSONTextError(f"not JSON {wrong_at(content, end, 'more text after its end', end + 1)}")
    if decoder.problem is not None:
        raise decoder.problem
    return value
