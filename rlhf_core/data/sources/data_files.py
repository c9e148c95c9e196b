"""Rows of the user's data files, and of files behind URLs."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.data.sources import FilesSource
from rlhf_core.config.texts import hub_hint
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.base import BadRow, Located, RowSource
from rlhf_core.data.sources.files import SUFFIXES, Budget, file_type, iterate_file
from rlhf_core.data.sources.opening import COMPRESSIONS, name_problem
from rlhf_core.data.sources.remote import fetch_file, reading, require_unchanged
from rlhf_core.system.paths import file_problem

# Before a run, the beginning of a source is read, up to these rows and decompressed bytes; of each file at least its
# first row.
_ROWS = 20_000
_BYTES = 64 * 2**20


class DataFiles(RowSource[FilesSource]):
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        for path in self.config.paths:
            if "://" in path and self.config.streaming:
                with reading(path):
                    yield from iterate_file(path, shown=path, bad_row=bad_row)
            else:
                local = _fetched(path, context) if "://" in path else context.user_file(path)
                yield from iterate_file(str(local), shown=path, bad_row=bad_row)

    def require_as_planned(self, context: StageContext) -> None:
        for url in self.config.paths:
            if "://" in url:
                require_unchanged(url, context.pin(url))

    def first_rows(self, root: Path, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        budget = Budget(_BYTES)
        rows = 0
        for path in self.config.paths:
            if "://" in path:
                file_type(path)
                continue
            problem = _path_problem(path, root)
            if problem:
                raise RowError(f"{path}: {problem}")
            budget.num_bytes = max(budget.num_bytes, 1)
            for located in iterate_file(str(root / path), path, bad_row, budget):
                rows += 1
                yield located
                if rows >= _ROWS:
                    break

    def is_whole(self, rows: int, root: Path) -> bool:
        files = [root / path for path in self.config.paths]
        if rows >= _ROWS or not all(map(os.path.isfile, files)):
            return False
        decompresses = any(path.suffix in COMPRESSIONS for path in files)
        return not decompresses and sum(path.stat().st_size for path in files) < _BYTES


def _fetched(url: str, context: StageContext) -> Path:
    """Return a local copy of the file at `url`, with the content that the key was computed from."""
    target = context.workdir / "fetched" / hashlib.sha256(url.encode()).hexdigest()
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        fetch_file(url, context.pin(url), target)
    return target


def _path_problem(path: str, root: Path) -> str | None:
    if unnamed := name_problem(path):
        return unnamed
    local = root / path
    problem = file_problem(local)
    if problem is None:
        return None
    if glob.has_magic(path) and not os.path.lexists(local):
        return f"no file matches this pattern (looked in {root})"
    if os.path.isdir(local):
        return f"there is no data file in this folder, whose name ends in {', '.join(SUFFIXES)}"
    plain = "; write the path out: `~` and `$` mean nothing here" if path.startswith("~") or "$" in path else ""
    hub = "" if os.path.lexists(local) or Path(path).suffix in (*SUFFIXES, *COMPRESSIONS) else hub_hint(path)
    return f"{problem} (looked for {local}){plain}{hub}"
