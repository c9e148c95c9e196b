"""Errors of a full disk, with the remedy: the folder to free, or the variable that moves it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import StageError
from rlhf_core.stages.job_context import node_cache, workdir_root

_FULL = (errno.ENOSPC, errno.EDQUOT)
# For libraries that raise errors of their own, and actors, whose errors come as text.
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")
_PATH = re.compile(r"['\"](/[^'\"]+)['\"]")


def explained(error: BaseException) -> BaseException:
    """Return `error`, or, if a full disk is its cause, a StageError with the folder and the variable that moves it."""
    for cause in _causes(error):
        if (isinstance(cause, OSError) and cause.errno in _FULL) or _FULL_TEXT.search(str(cause)):
            return StageError(f"{_where(cause)} ({error})")
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where(error: BaseException) -> str:
    """Return the folder of the file in the error; else our folder with the least room."""
    named = error.filename if isinstance(error, OSError) else None
    if not named and (match := _PATH.search(str(error))):
        named = match[1]
    folders = _folders()
    if named:
        inside = [item for item in folders if Path(str(named)).is_relative_to(item[0])]
        folder, variable = max(inside, key=lambda item: len(item[0].parts), default=(Path(str(named)).parent, ""))
    else:
        folder, variable = min(folders, key=lambda item: shutil.disk_usage(item[0]).free)
    move = (
        f", or move the folder with {variable} in the environment (of jobs: of the cluster's nodes)" if variable else ""
    )
    return f"the disk of {folder} is full: free space there{move}"


def _folders() -> list[tuple[Path, str]]:
    """Return the folders that jobs write to on this node, and the variables that move them."""
    folders = [
        (node_cache(), "ALIGNMENT_CACHE"),
        (workdir_root(), "ALIGNMENT_WORKDIR"),
        (Path(tempfile.gettempdir()), "TMPDIR"),
        (Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"), "HF_HOME"),
    ]
    if wandb := os.environ.get("WANDB_DIR"):
        folders.append((Path(wandb), "WANDB_DIR"))
    store = os.environ.get("ALIGNMENT_STORE", "")
    if store and "://" not in store:
        folders.append((Path(store), "ALIGNMENT_STORE"))
    return [(folder, variable) for folder, variable in folders if folder.is_dir()]
