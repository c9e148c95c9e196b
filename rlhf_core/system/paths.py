"""Resolution of user-given paths, and the reasons for unusable ones."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import RecipeError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # nothing more can be written
_KINDS = {
    stat.S_ISDIR: "is a folder, not a file",
    stat.S_ISFIFO: "is a named pipe, not a file: write its content to a file",
    stat.S_ISSOCK: "is a socket, not a file",
    stat.S_ISCHR: "is a device, not a file",
    stat.S_ISBLK: "is a device, not a file",
}


def user_path(path: str | Path, variable: str = "") -> Path:
    """Expand `~` and `~name` in `path`. variable: the environment variable that holds it.

    Raises RecipeError if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise RecipeError(f"{_named(path, variable)}: unknown user {user}; write ./{user} for a folder") from error


def resolved(path: str | Path, variable: str = "") -> Path:
    """Return `user_path`, absolute and without links. Raises RecipeError for a link that leads to itself."""
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
    """Name `path` in the error of a full disk, which names no file while one is written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = error.filename or str(path.absolute())
        raise


def file_problem(path: Path) -> str | None:
    """Return why a local path cannot be opened as a file; None if it can. Opens nothing: opening a pipe might block."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "is a link to a file that is not there" if path.is_symlink() else "there is no such file"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), None)
    return kind if kind or os.access(path, os.R_OK) else "cannot be read (Permission denied)"
