"""The interface of a source of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from rlhf_core.config.data.sources import SOURCES, SourceConfig
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import Row, RowError

Located = tuple[str, Row]  # where the row is, for messages; the row

BadRow = Callable[[str, RowError], None]  # called with the place of a row that cannot be read, and its problem

C = TypeVar("C", bound=SourceConfig)


def raise_bad_row(where: str, error: RowError) -> None:
    """Raise the error of a bad row: the BadRow of `on_bad_row: error`."""
    raise error.at(where)


class RowSource(ABC, Generic[C]):
    """Rows, as the source has them. Each row that cannot be read is given to `bad_row` and skipped."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        """Yield all rows.

        context: has the user's files and the pins of remote sources. data_format: of the dataset.
        Raises RowError for a file that cannot be split into rows, and StageError for a source that cannot be read.
        """

    def require_as_planned(self, context: StageContext) -> None:
        """Check a streaming source after it was read. Raises StageError if its content is not the planned one."""

    def first_rows(self, root: Path, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        """Yield the rows that can be read in a moment, before a run; none of a source that is fetched.

        root: the recipe's folder. Raises RowError or RecipeError for a source that cannot be read.
        """
        return iter(())

    def is_whole(self, rows: int, root: Path) -> bool:
        """Return True if the first rows, of which there are `rows`, are all."""
        return False


def open_source(config: SourceConfig) -> RowSource[Any]:
    source: RowSource[Any] = resolve_name(SOURCES[config.type].implementation)(config)
    return source
