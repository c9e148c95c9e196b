"""The console of the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDE = 300  # characters: for what is drawn, such as trees, where the output is no terminal


class _Output(Console):
    """A console that truncates nothing and wraps nothing where its output is no terminal.

    Tables are lines of cells there, separated by tabs, that `cut`, `grep` and `awk` can read.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal:
            if all(isinstance(item, str | Text) for item in objects):
                options = {"soft_wrap": True, "highlight": False, **options}  # a line is copied as one
            super().print(*objects, **options)
            return
        for item in objects:
            if isinstance(item, Table):
                self.file.writelines(f"{line}\n" for line in tab_separated(item))  # rich would make spaces of the tabs
            else:
                super().print(item, **{"soft_wrap": True, "highlight": False, **options})


def table_or(table: Table, sentence: str) -> RenderableType:
    """Return the table, or the sentence in place of one without rows."""
    return table if table.row_count else sentence


def tab_separated(table: Table) -> Iterable[str]:
    """Yield the table's title, header and rows as lines; line ends and tabs in cells become spaces."""
    if table.title is not None:
        yield _plain(table.title)
    if table.show_header and any(_plain(column.header) for column in table.columns):
        yield "\t".join(_plain(column.header) for column in table.columns)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        yield "\t".join(_plain(cell) for cell in row)
    if table.caption is not None:
        yield _plain(table.caption)


def _plain(cell: RenderableType) -> str:
    return " ".join((cell.plain if isinstance(cell, Text) else str(cell)).split())


def _width() -> int | None:
    return None if sys.stdout is not None and sys.stdout.isatty() else _WIDE


# The only one: it prints the text of users and stores as it is, where rich would read `[/red]` and `:warning:` as
# markup. What is coloured has a style.
console = _Output(markup=False, emoji=False, width=_width())
