"""The environment variables of this system, `ALIGNMENT_…`: each is declared here, and checked on every read.

The `alignment` command and the worker check all of them at start, since most are read much later, by a service or a
job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import RecipeError, VariableError, one_line
from rlhf_core.system.paths import resolved, user_path

_PORT = "ALIGNMENT_PORT_"
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]+)?")
_LONGEST_SOCKET = 107  # bytes


@dataclass(frozen=True, slots=True)
class Variable:
    """problem: returns the remedy for a non-empty value that cannot be used; empty for a valid one."""

    problem: Callable[[str], str]
    secret: bool = False


def header_of(name: str) -> dict[str, str]:
    """Return the HTTP header in a variable that a recipe names. Raises VariableError."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise VariableError(f"the environment variable {name}, which the recipe names, is not set in this job")
    header, colon, text = value.partition(":")
    if not (header.strip() and colon and text.strip()):
        raise VariableError(f"the environment variable {name} must be a header such as `Authorization: Bearer abc`")
    return {header.strip(): text.strip()}


def value_of(name: str) -> str | None:
    """Return the value of a declared variable; None if it is unset or empty. Raises VariableError."""
    variable = declared(name)
    assert variable is not None, f"{name} is not declared"
    value = os.environ.get(name)
    if not value:
        return None
    if problem := variable.problem(value):
        shown = "" if variable.secret else f" is `{one_line(value)}`"
        raise VariableError(f"{name}{shown}: {problem}")
    return value


def folder_of(name: str) -> Path | None:
    """Return the folder in a variable, `~` expanded; None if it is unset. Raises VariableError."""
    value = value_of(name)
    return None if value is None else user_path(value)


def check_all() -> None:
    """Raise VariableError for the first variable with an unusable value."""
    for name in sorted(os.environ):
        if declared(name) is not None:
            value_of(name)


def declared(name: str) -> Variable | None:
    return _PORTS if name.startswith(_PORT) else VARIABLES.get(name)


def store_problem(url: str) -> str:
    """Return why a URL cannot be a store's; empty if it can."""
    path = url.removeprefix("file://")
    if url.startswith("s3://"):
        return ""
    if path != path.strip():
        return "it begins or ends with a space: remove that"
    if "://" in path:
        return "this kind of store is unknown: give s3://bucket/prefix or the path of a folder"
    return _absolute(path, ", or a URL s3://bucket/prefix")


def _absolute(path: str, otherwise: str = "") -> str:
    """Reject a relative path: jobs and services run in other folders than the command."""
    try:
        place = resolved(path)
    except RecipeError as error:
        return str(error).removeprefix(f"{path}: ")
    return "" if user_path(path).is_absolute() else f"it must be an absolute path, such as {place}{otherwise}"


def _folder(path: str) -> str:
    """Check a folder, which is created if missing."""
    return _absolute(path) or _can_be_written(path)


def _stack_folder(path: str) -> str:
    """Check a folder that only the command itself reads, and that may be relative."""
    problem = _absolute(path)
    return _can_be_written(path) if not problem or "absolute" in problem else problem


def _can_be_written(path: str) -> str:
    folder = resolved(path)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return f"{there} is a file, not a folder: give another path"
    return (
        "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to: permit it, or give another path"
    )


def _folder_of_recipes(path: str) -> str:
    return _absolute(path) or ("" if user_path(path).is_dir() else "there is no such folder: correct or unset it")


def _file(path: str) -> str:
    return _absolute(path) or ("" if user_path(path).is_file() else "there is no such file: correct or unset it")


def _socket(path: str) -> str:
    too_long = len(os.fsencode(path)) > _LONGEST_SOCKET
    return _absolute(path) or (
        f"a socket's path has {_LONGEST_SOCKET} bytes at most: give a shorter one" if too_long else ""
    )


def _number(what: str, example: str, above: float) -> Callable[[str], str]:
    """Return the check for a decimal number above `above`."""
    return lambda text: (
        "" if _NUMBER.fullmatch(text) and float(text) > above else f"set it to {what}, such as {example}"
    )


def _whole_number(what: str, low: int, high: int) -> Callable[[str], str]:
    def problem(text: str) -> str:
        good = text.isascii() and text.isdecimal() and len(text) <= len(str(high)) and low <= int(text) <= high
        return "" if good else f"set it to {what} from {low} to {high}"

    return problem


def _one_of(*values: str) -> Callable[[str], str]:
    return lambda text: "" if text in values else f"set it to {' or '.join(values)}, or unset it"


def _url(text: str) -> str:
    return "" if text.startswith(("http://", "https://")) else "set it to an http(s) URL, or unset it"


def _token(text: str) -> str:
    if all("!" <= sign <= "~" for sign in text.strip()):
        return ""
    return (
        "it has a sign that no HTTP header can have in a token: set it to printable ASCII without spaces, such as "
        "`openssl rand -hex 32` prints"
    )


_PORTS = Variable(_whole_number("a port number", 1024, 65535))
VARIABLES: Mapping[str, Variable] = {
    "ALIGNMENT_AUTOSCALING": Variable(_one_of("0", "1")),
    "ALIGNMENT_CACHE": Variable(_folder),
    "ALIGNMENT_CACHE_GIB": Variable(_number("the number of GiB that the cache may hold", "50", above=0)),
    "ALIGNMENT_DEVICE": Variable(_one_of("cpu", "gpu")),
    "ALIGNMENT_NODE_LOCK": Variable(_file),
    "ALIGNMENT_PRICES": Variable(_file),
    "ALIGNMENT_RAY_CPUS": Variable(_whole_number("the number of CPUs that Ray offers,", 1, 4096)),
    "ALIGNMENT_RECIPES": Variable(_folder_of_recipes),
    "ALIGNMENT_SERVE_TOKEN": Variable(_token, secret=True),
    "ALIGNMENT_SHIP_CODE": Variable(_one_of("0", "1")),
    "ALIGNMENT_STACK_DIR": Variable(_stack_folder),
    "ALIGNMENT_STACK_TIMEOUT": Variable(_number("a number of seconds", "180", above=-1)),
    "ALIGNMENT_STOP_SECONDS": Variable(_number("the seconds that a stopped job has for a checkpoint", "5", above=-1)),
    "ALIGNMENT_STORE": Variable(store_problem),
    "ALIGNMENT_WARM": Variable(_one_of("0", "1")),
    "ALIGNMENT_WARM_SOCKET": Variable(_socket),
    "ALIGNMENT_WEBHOOK": Variable(_url, secret=True),
    "ALIGNMENT_WORKDIR": Variable(_folder),
    # Set by the system itself, for its own processes.
    "ALIGNMENT_FORWARDED": Variable(lambda text: ""),
    "ALIGNMENT_STACKS_OF": Variable(lambda text: ""),
    "ALIGNMENT_STACK_SERVICE": Variable(lambda text: ""),
    "ALIGNMENT_TRY_TERMINAL": Variable(lambda text: ""),
}
