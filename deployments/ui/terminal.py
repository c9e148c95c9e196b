"""The screen of `alignment browse`: a stack of pages, moved through by single keys. All text is escaped here."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from deployments.ui.terminal_pages import Page, Row
from rlhf_core.errors import AlignmentError, one_line

_HELP = "↑ ↓ move   ⏎ open   ⌫ back   n p next, previous   tab rows   r reload   q quit"
_KEYS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    **dict.fromkeys(("\x1b[5~", "b"), "page up"),
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "top"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    **dict.fromkeys(("\r", "\n", "\x1b[C", "\x1bOC", "l"), "open"),
    **dict.fromkeys(("\x7f", "\b", "\x1b", "\x1b[D", "\x1bOD", "h"), "back"),
    "n": "next", "p": "previous", "\t": "rows", "r": "reload", "q": "quit",
}  # fmt: skip
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)
_RELOAD_SECONDS = 10.0  # of a page that changes, as in the browser
_RESIZE_SECONDS = 0.5  # between two looks at the terminal's size
_SEQUENCE_SECONDS = 0.05  # in which the rest of a key's sequence arrives
_CURSOR = Style(reverse=True)

_WIDEST_COLUMN = 60  # but for the last, which has what is left
_LEAST_TEXT = 8  # characters of the last column
_GAP = 2  # between columns

Lines = list[list[Segment]]


@dataclass(slots=True)
class _Opened:
    make: Callable[[], Page]
    page: Page
    row: int | None = None  # of the page before, that opened it
    cursor: int | None = None  # a line: of the text, the table's header, or a row; None: nobody has moved it
    top: int = 0
    above: Lines = field(default_factory=list)  # the page's text
    widths: list[int] = field(default_factory=list)  # of the columns
    laid_out: tuple[Page, int] | None = None  # the page and the width of the terminal

    @property
    def first_row(self) -> int:
        return len(self.above) + 1

    @property
    def last_line(self) -> int:
        return len(self.above) + len(self.page.rows)


def browse_pages(console: Console, make: Callable[[], Page]) -> None:
    """Show a page, and those that its rows open, until `q`; restore the terminal then, or on any error."""
    screen = Screen(console, make)
    with _keys_at_once(), console.screen(hide_cursor=True):
        screen.draw()
        for keys in _keys(screen.wait):
            for key in keys:
                if key == "quit":
                    return
                screen.press(key)
            screen.draw()


def page_table(page: Page, rows: Sequence[Row], widths: Sequence[int | None]) -> Table:
    """Return rows of a page as a table, one line each, with control characters escaped. A width None fits all rows."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for (name, justify), width in zip(page.columns, widths, strict=True):
        table.add_column(Text(one_line(name)), justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row.cells), style=row.style)
    return table


class Screen:
    def __init__(self, console: Console, make: Callable[[], Page]):
        self._console = console
        self._stack = [_Opened(make, make())]
        self._message = ""
        self._size = console.size
        self._made_at = time.monotonic()

    def draw(self) -> None:
        """Draw the newest page: its path, as many of its lines as there is room for, and the keys or a message."""
        self._size = width, height = self._console.size
        opened, room = self._stack[-1], max(1, height - 2)
        self._lay_out(opened, width)
        cursor, header = self._cursor(opened), opened.first_row - 1
        top = max(min(opened.top, cursor), cursor - room + 1)
        is_pinned = top > header  # which stays on top
        opened.top = top = max(top, cursor - room + 2) if is_pinned else top
        start = max(0, top - opened.first_row)
        table = page_table(opened.page, opened.page.rows[start : start + room], opened.widths)
        options = self._console.options.update(width=max(width, sum(opened.widths) + _GAP * len(opened.widths)))
        shown = [*opened.above[top:], *self._console.render_lines(table, options)][:room]
        place = cursor - top + is_pinned
        shown[place] = list(Segment.apply_style(shown[place], post_style=_CURSOR))
        shown += [[]] * (room - len(shown))
        titles = [one_line(each.page.title) for each in self._stack]
        while len(titles) > 2 and cell_len(_path(titles)) > width:
            titles[:2] = ["…"]
        path = Text(_path(titles), "bold")
        foot = Text(one_line(self._message) or _HELP, "yellow" if self._message else "dim")
        lines = [self._one(path, width), *shown, self._one(foot, width)]
        self._console.update_screen_lines([Segment.adjust_line_length(line, width) for line in lines[:height]])

    def press(self, key: str) -> None:
        """Do what a key asks for; an error of the store becomes the message, and the page stays."""
        self._message = ""
        opened = self._stack[-1]
        self._lay_out(opened, self._size.width)
        cursor, page = self._cursor(opened), max(1, self._size.height - 3)
        moves = {
            "up": cursor - 1, "down": cursor + 1, "page up": cursor - page, "page down": cursor + page,
            "top": 0, "end": opened.last_line, "rows": opened.first_row,
        }  # fmt: skip
        try:
            if key in moves:
                opened.cursor = moves[key]
            elif key == "open":
                self._open(cursor - opened.first_row)
            elif key == "back" and len(self._stack) > 1:
                self._stack.pop()
            elif key in ("next", "previous"):
                self._open_beside(1 if key == "next" else -1)
            elif key == "reload":
                self._reload()
        except AlignmentError as error:
            self._message = str(error)

    def wait(self) -> None:
        """Draw again what changed while no key was pressed: the terminal's size, or a page of something that runs."""
        if self._stack[-1].page.changes and time.monotonic() - self._made_at > _RELOAD_SECONDS:
            self.press("reload")
            self.draw()
        elif self._console.size != self._size:
            self.draw()

    def _lay_out(self, opened: _Opened, width: int) -> None:
        page = opened.page
        if opened.laid_out == (page, width):
            return
        text = Text("\n".join(one_line(line) for line in page.text.strip("\n").split("\n")))
        options = self._console.options.update(width=width)
        opened.above = [*self._console.render_lines(text, options), []] if text.plain else []
        cells = zip(*(row.cells for row in page.rows), strict=True) if page.rows else ((),) * len(page.columns)
        *others, last = [
            max(cell_len(one_line(cell)) for cell in (name, *column))
            for (name, _), column in zip(page.columns, cells, strict=True)
        ]
        others = [min(each, _WIDEST_COLUMN) for each in others]
        left = width - sum(others) - _GAP * len(others)
        opened.widths = [*others, min(last, max(left, _LEAST_TEXT))]
        opened.laid_out = page, width

    def _cursor(self, opened: _Opened) -> int:
        start = opened.first_row if any(row.opens for row in opened.page.rows) else 0
        return max(0, min(start if opened.cursor is None else opened.cursor, opened.last_line))

    def _open(self, row: int) -> None:
        rows = self._stack[-1].page.rows
        if 0 <= row < len(rows) and (make := rows[row].opens) is not None:
            self._stack.append(_Opened(make, make(), row))
            self._made_at = time.monotonic()

    def _open_beside(self, way: int) -> None:
        """Open the next or the previous page of those that the page before lists."""
        opened = self._stack[-1]
        if opened.row is None:
            return
        before = self._stack[-2]
        row = opened.row + way
        if 0 <= row < len(before.page.rows) and (make := before.page.rows[row].opens) is not None:
            self._stack[-1] = _Opened(make, make(), row)
            before.cursor = before.first_row + row
        else:
            self._message = "there is none: this is the last" if way > 0 else "there is none: this is the first"

    def _reload(self) -> None:
        self._made_at = time.monotonic()
        self._stack[-1].page = self._stack[-1].make()

    def _one(self, text: Text, width: int) -> list[Segment]:
        text.no_wrap, text.overflow = True, "ellipsis"
        return self._console.render_lines(text, self._console.options.update(width=width))[0]


def _path(titles: Sequence[str]) -> str:
    return " › ".join(titles)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let the terminal deliver each key at once and without echo. Ctrl-C stays a signal."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        settings = termios.tcgetattr(sys.stdin)
        settings[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on this screen
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keys(wait: Callable[[], None]) -> Iterator[list[str]]:
    """Yield what the keys mean that were pressed since; call `wait` while there are none. Ends with the terminal."""
    terminal = sys.stdin.fileno()
    while True:
        if not select.select([terminal], [], [], _RESIZE_SECONDS)[0]:
            wait()
            continue
        data = os.read(terminal, 1024)
        if not data:
            return
        while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([terminal], [], [], _SEQUENCE_SECONDS)[0]:
            data += os.read(terminal, 1024)
        yield [_KEYS[key] for key in _KEY.findall(data.decode(errors="replace")) if key in _KEYS]
