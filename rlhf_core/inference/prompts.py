"""Prompts of `alignment generate`, from a data file or standard input."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_core.data.formats import Row, RowError, canonical_row
from rlhf_core.data.sources.files import iterate_file
from rlhf_core.data.sources.json_rows import NOT_UTF8, json_rows
from rlhf_core.data.sources.opening import open_data
from rlhf_core.errors import RecipeError
from rlhf_core.system.scratch import scratch_folder

STANDARD_INPUT = "-"
_SHOWN_INPUT = "standard input"


def read_prompts(source: str, *, lines: bool, system: str | None) -> list[Row]:
    """Return canonical rows of the format `prompts`, in order.

    source: a data file as recipes name them, or `-` for standard input, one JSON object a line; lines: each line is the
    text of a prompt; system: a system turn that all begin with.
    Raises RecipeError, with the file and the line, for an invalid prompt.
    """
    try:
        with _local(source) as (path, shown):
            rows = [_prompt(where, raw, system) for where, raw in _raw_rows(path, shown, lines=lines)]
    except RowError as error:
        raise RecipeError(str(error).removesuffix(" (see `columns` in the recipe)")) from error
    if not rows:
        raise RecipeError(f"{_SHOWN_INPUT if source == STANDARD_INPUT else source}: there is no prompt in it")
    return rows


@contextmanager
def _local(source: str) -> Iterator[tuple[str, str]]:
    """Yield the path to read, and its name for messages."""
    if source != STANDARD_INPUT:
        yield source, source
        return
    if sys.stdin.isatty():
        raise RecipeError("PROMPTS is missing: give a file, or write prompts to the standard input of this command")
    with scratch_folder("prompts") as folder:
        with (folder / "rows").open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield str(folder / "rows"), _SHOWN_INPUT


def _raw_rows(path: str, shown: str, *, lines: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not lines and shown != _SHOWN_INPUT:
        yield from iterate_file(path, shown)
        return
    if lines:
        with open_data(path, shown) as file:
            for number, line in enumerate(file, 1):
                yield from _line(f"{shown} line {number}", line)
        return
    for where, row, _ in json_rows(path, shown):
        if isinstance(row, RowError):
            raise row.at(where)
        if row is not None:
            yield where, row


def _line(where: str, line: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError(f"{where}: {NOT_UTF8}") from error
    if text.strip():
        yield where, {"prompt": text}


def _prompt(where: str, raw: Mapping[str, Any], system: str | None) -> Row:
    try:
        row = canonical_row(raw, "prompts", {})
        if system is None:
            return row
        if row["prompt"][0]["role"] == "system":
            raise RowError("the prompt begins with a system turn already: remove it, or omit --system")
        return canonical_row({**row, "prompt": [{"role": "system", "content": system}, *row["prompt"]]}, "prompts", {})
    except RowError as error:
        raise error.at(where) from error
