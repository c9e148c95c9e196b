"""Settings of a user's Python file and the files that it needs."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, operational
from rlhf_core.config.texts import Variable


class UserFile(Config):
    """A setting with a user's Python file."""

    path: str = Field(description="a Python file; a relative path starts at the recipe's folder")
    files: tuple[str, ...] = Field(
        default=(), description="further files imported or read by it: modules next to it, or in folders below"
    )

    def named_files(self) -> tuple[str, ...]:
        return (self.path, *self.files)

    @model_validator(mode="after")
    def _files_beside(self) -> UserFile:
        check_beside(self.path, self.files)
        return self


class UserProgram(UserFile):
    """A user's Python file that runs beside the computation and may need credentials."""

    variables: tuple[Variable, ...] = operational(
        (), description="environment variables used by it, such as one with a token"
    )

    def named_variables(self) -> tuple[str, ...]:
        return self.variables


class CalledBeforeJob(UserProgram):
    """A program that `plan` can call once, on one row."""

    call_before_job: bool = operational(
        True, description="call it once, on the first row, before a job starts; false: it needs resources of its job"
    )


def check_options(options: Mapping[str, Any], parameters: Sequence[str], function: str) -> None:
    """Raise ValueError for an option with the name of one of the parameters that each call passes to `function`."""
    taken = next((name for name in options if name in parameters), None)
    if taken is not None:
        raise ValueError(
            f"options.{taken}: every call gives `{function}` its own `{taken}` (as it does {', '.join(parameters)}): "
            "give the option another name, here and in the file"
        )


def check_beside(path: str, files: Sequence[str]) -> None:
    """Raise ValueError for a file that the Python file `path` could not import: one outside of its folder."""
    for file in files:
        inside = "" if posixpath.isabs(file) != posixpath.isabs(path) else beside(path, file)
        if inside.partition("/")[0] in ("", ".", ".."):
            raise ValueError(f"`{file}` in `files` must be a file in the folder of {path}, or in one below it")
        if inside == beside(path, path):
            raise ValueError(f"`{file}` in `files` is the file itself: remove it")


def beside(path: str, file: str) -> str:
    """Return `file` relative to the folder of `path`; both as written in the recipe."""
    return posixpath.relpath(file, posixpath.dirname(path) or ".")
