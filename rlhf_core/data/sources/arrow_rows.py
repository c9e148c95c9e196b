"""Rows from Arrow, in parquet files and data sets of the hub."""

from __future__ import annotations

from typing import Any

from rlhf_core.data.formats import Row


def without_added_nulls(row: Row) -> Row:
    """Return the row without keys, inside of its columns, that are null.

    Arrow gives every mapping of a column the keys of all of them, null where a row had none: the arguments of one tool
    call would get the names of all other tools' arguments. Original nulls cannot be distinguished from these.
    """
    return {column: _cleaned(value) for column, value in row.items()}


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value
