"""Canonical rows on disk: a dataset stage holds only their places in host memory, however long the rows are."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class RowSpool:
    """A file of rows that are appended in one order and read back in another. Deleted at the end of its context."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q", [0])  # where each row begins in the file; last, where the next one will

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def append(self, row: Mapping[str, Any]) -> None:
        written = self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode())
        self._starts.append(self._starts[-1] + written)

    def read(self, indices: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The rows with these numbers, counted in the order in which they were appended. Nothing is appended after."""
        for index in indices:
            self._file.seek(self._starts[index])
            yield json.loads(self._file.read(self._starts[index + 1] - self._starts[index]))
