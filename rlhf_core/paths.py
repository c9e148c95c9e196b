"""Paths as a person gives them, and why one cannot be used."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import RecipeError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # nothing more can be written


def user_path(path: str | Path, variable: str = "") -> Path:
    """`path`, with the home folder that `~` or `~name` stands for. variable: of the environment, which holds it.

    Raises RecipeError if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise RecipeError(
            f"{_named(path, variable)}: {user} is the home folder of nobody here; write ./{user} for a folder"
        ) from error


def resolved(path: str | Path, variable: str = "") -> Path:
    """`user_path`, absolute and without links. Raises RecipeError for a link that leads to itself."""
    try:
        return user_path(path, variable).resolve()
    except RuntimeError as error:
        raise RecipeError(
            f"{_named(path, variable)}: this link leads to itself: correct it, or give another path"
        ) from error


def _named(path: str | Path, variable: str) -> str:
    return f"{variable}={path}" if variable else str(path)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """The error of a full disk, which names no file where one is written to, is said of `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = error.filename or str(path.absolute())
        raise
