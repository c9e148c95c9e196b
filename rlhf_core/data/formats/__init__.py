"""Canonical rows: the content of every dataset artifact, whatever its source.

    text           {id, text}
    conversations  {id, messages: [messages], tools?}                        at least one assistant turn
    preferences    {id, prompt: [messages], chosen: completion, rejected: completion, margin?: float, tools?}
    unpaired       {id, prompt: [messages], completion: str, label: bool, tools?}
    completions    {id, prompt: [messages], completions: [{text, reward?, rewards?, logprob?}], tools?}
    stepwise       {id, prompt: [messages], steps: [str], labels: [float from 0 to 1], tools?}
    prompts        {id, prompt: [messages], answer?: str, task?: str, metadata?: dict, tools?, and all other columns}
                   of a row of NeMo Gym: {id, prompt: [messages], tools?, nemo_gym: the row}
    a completion   str, or [messages] where they part before their last turn
    a message      {role, content: str, tool_calls?, reasoning_content?, name?, tool_call_id?, images?: [SHA-256]}

`id` is a prefix of the SHA-256 of the row's content. A source may write a prompt as plain text, messages as
`{from, value}`, and chosen and rejected as text, as one message, or as whole conversations that share a prompt.
In conversations and prompts, messages other than the assistant's may have images (chat/image_messages.py).
Tools and tool calls are read by rlhf_core/chat/tool_schemas.py. A format is one file here and a line in
config/data/format_table.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

from rlhf_core.config.data.format_table import FORMATS
from rlhf_core.data.formats.base import (
    Format,
    MissingColumnError,
    Row,
    RowError,
    Rows,
    input_row_id,
    normalised,
    row_id,
)

__all__ = ["Format", "Row", "RowError", "Rows", "canonical_row", "format_of", "normalised", "row_id"]


UNUSED = "unused"  # what `columns` calls a column that is left out


def format_of(name: str) -> Format:
    """Return the format called `name` in recipes."""
    return _implementation(FORMATS[name].implementation)


@cache
def _implementation(implementation: str) -> Format:
    instance: Format = resolve_name(implementation)()
    return instance


def canonical_row(
    source: Mapping[str, Any],
    data_format: str,
    columns: Mapping[str, str],
    read_images: Callable[[Row, Sequence[str]], Row] | None = None,
) -> Row:
    """Convert `source` to the canonical form of `data_format`, with its `id`.

    columns: canonical column -> the source's column, or a field of one. read_images: an ImageReader of data/images.py;
    none: a row with images is rejected.
    Raises RowError that names the column, and the existing columns.
    """
    for name in source:
        if not isinstance(name, str):
            raise RowError(f"a column is called {name!r}, which is not text", "a column's name is not text")
    form = format_of(data_format)
    try:
        row = _renamed(source, columns)
        if read_images is not None and form.has_images:
            row = read_images(row, form.completions_with_images)
        row = form.canonical(row)
    except MissingColumnError as error:
        if source.get(columns.get(error.column, error.column), "") is None:
            raise RowError(f"`{error.column}` is null") from error
        raise
    row.pop("id", None)
    return {"id": input_row_id(row), **row}


def _renamed(source: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    named = {name: _value(source, column) for name, column in columns.items()}
    taken = set(columns.values())
    row = {name: value for name, value in source.items() if name not in taken and value is not None}
    return row | {name: value for name, value in named.items() if name != UNUSED and value is not None}


def _value(source: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field of one, as in `column.field`. Raises MissingColumnError."""
    if column in source:
        return source[column]
    value: Any = source
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise MissingColumnError(column, source)
        value = value[part]
    return value
