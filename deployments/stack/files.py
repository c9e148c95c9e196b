"""The files of a stack's folder. An unreadable one ends a command with one sentence that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf_core.errors import StackError, one_line

V = TypeVar("V")

_ANEW = "remove it and run `alignment down && alignment up`, which writes a new one"
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\0]*)")


def read_text(file: Path, remedy: str = _ANEW) -> str:
    """Read a file. remedy: for a damaged one. Raises StackError if it is no text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StackError(f"{file} is not UTF-8 text: {remedy}") from error


def read_variables(file: Path) -> dict[str, str]:
    """Parse lines `NAME=value`, which become the environment of commands, and text for a shell's `eval`.

    Raises StackError for any other content.
    """
    variables = {}
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line:
            continue
        match = _VARIABLE.fullmatch(line)
        if match is None:
            raise StackError(f"{file}, line {number} is `{one_line(line)[:80]}`, which is not NAME=value: {_ANEW}")
        variables[match[1]] = match[2]
    return variables


def read_values(file: Path, what: str, allowed: Callable[[object], V | None]) -> dict[str, V]:
    """Read the JSON object in `file`; {} if there is no such file.

    allowed: converts a value, or returns None for an invalid one; what: noun of the values. Raises StackError.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise StackError(f"{file} is not JSON ({error}): {_ANEW}") from error
    if not isinstance(content, dict):
        raise StackError(f"{file} is not a JSON object of {what}: {_ANEW}")
    values: dict[str, V] = {}
    for name, raw in content.items():
        value = allowed(raw)
        if value is None:
            raise StackError(f"{file}: `{one_line(name)}` is {raw!r}, and it must be one of {what}: {_ANEW}")
        values[name] = value
    return values


def read_pid(file: Path, remedy: str) -> int | None:
    """Read a process id; None if there is no such file. Raises StackError."""
    if not file.is_file():
        return None
    text = read_text(file, remedy).strip()
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) < 2**31):
        raise StackError(f"{file} holds `{one_line(text)[:80]}`, which is not a process ID: {remedy}")
    return int(text)
