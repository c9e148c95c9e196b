"""The files that a Python file of the user needs beside it."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TypeAlias

CodeFiles: TypeAlias = tuple[str, ...]
CODE_FILES = "further files that it imports or reads: modules next to it, or in folders below"


def check_beside(path: str, files: Sequence[str]) -> None:
    """Raise ValueError for a file that the Python file `path` could not import: one outside of its folder."""
    for file in files:
        inside = "" if posixpath.isabs(file) != posixpath.isabs(path) else beside(path, file)
        if inside.partition("/")[0] in ("", ".", ".."):
            raise ValueError(f"`{file}` in `files` must be a file in the folder of {path}, or in one below it")
        if inside == beside(path, path):
            raise ValueError(f"`{file}` in `files` is the file itself: leave it out")


def beside(path: str, file: str) -> str:
    """`file` as seen from the folder of `path`; both as the recipe writes them."""
    return posixpath.relpath(file, posixpath.dirname(path) or ".")
