"""JSON that means one thing: a key twice, NaN and infinity are mistakes, though Python's reader takes them."""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.system.listing import first_repeated

_SHOWN = 20  # characters


class JSONTextError(ValueError):
    """The text says what is wrong. reason: the same without what belongs to this text alone."""

    def __init__(self, message: str, reason: str = "not JSON") -> None:
        super().__init__(message)
        self.reason = reason


class Decoder:
    """Reads one value after the other out of a text."""

    def __init__(self) -> None:
        self.problem: JSONTextError | None = None  # of the value decoded last: it has an end, but not one meaning
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def decode(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins at `start`, and where it ends.

        Raises json.JSONDecodeError, which has the place; JSONTextError for what no reader should be asked to read.
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
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = first_repeated([name for name, _ in pairs])
            self.problem = JSONTextError(f"the key `{twice}` occurs twice in one object", "a key occurs twice")
        return found

    def _constant(self, name: str) -> None:
        self.problem = JSONTextError(f"{name} is no JSON: write a number, or null", "NaN or infinity is no JSON")


def wrong_at(text: str, position: int, reason: str, column: int) -> str:
    """Where JSON went wrong, what stands there, and what to do about the usual mistakes."""
    before, rest = text[max(0, position - _SHOWN) : position].rstrip(), text[position : position + _SHOWN].lstrip(" ")
    if not rest.strip() or reason.startswith("Unterminated"):
        return f"({reason}, column {column}): is it cut off?"
    found = rest.splitlines()[0] or rest[0]
    if rest.startswith("'"):
        remedy = ": write double quotes"
    elif rest[0] in "}]" and reason.startswith(("Expecting value", "Expecting property", "Illegal trailing comma")):
        remedy = ": a comma before it is too much, or a value is missing"
    elif rest.startswith(("\r", ",", "{")) and before.endswith("}"):
        remedy = ": begin each row on a line of its own, ended by a line feed, without commas between"
    else:
        remedy = ""
    return f"({reason}, column {column}: {found!r}){remedy}"


def parse_json(text: str) -> Any:
    """The value that is the whole text. Raises JSONTextError."""
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
