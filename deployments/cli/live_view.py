"""The view of a run in progress: one line per stage, with its step, metrics and time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf_core.report.formatting import duration

_OTHER_GLYPH = Text("·")
_GLYPHS = {
    "waiting": Text("·", "dim"),
    **dict.fromkeys(("Reused", "Computed", "Completed"), Text("✓", "green")),
    **dict.fromkeys(("Failed", "Crashed", "Cancelled"), Text("✗", "red")),
}
_WORDS = {"NotReady": "not run"}
_LINE_SECONDS = 15.0  # without a terminal: between two lines about one stage's progress


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    state: str  # of its Prefect task run; "waiting" if there is none yet
    seconds: float
    percent: float | None
    text: str  # "step 3 of 20 · reward 0.4 · 0:35 left"

    @property
    def running(self) -> bool:
        return self.state == "Running"


class View(Protocol):
    def update(self, nodes: Sequence[NodeView]) -> None: ...

    def note(self, text: str) -> None: ...


@contextmanager
def view(console: Console) -> Iterator[View]:
    """Show a table that is redrawn in place on a terminal; elsewhere plain lines, each printed once."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield _Redrawn(console, live)


class _Redrawn:
    def __init__(self, console: Console, live: Live):
        self._console = console
        self._live = live
        # Kept between updates, so that the spinners keep turning.
        self._spinners: dict[str, Spinner] = {}

    def update(self, nodes: Sequence[NodeView]) -> None:
        table = Table.grid(padding=(0, 1))
        for node in nodes:
            bar = ProgressBar(total=100, completed=node.percent, width=20) if node.percent is not None else ""
            glyph = (
                self._spinners.setdefault(node.name, Spinner("dots"))
                if node.running
                else _GLYPHS.get(node.state, _OTHER_GLYPH)
            )
            elapsed = "" if node.state == "waiting" else duration(node.seconds)
            table.add_row(glyph, node.name, elapsed, bar if node.running else "", node.text if node.running else "")
        self._live.update(table)

    def note(self, text: str) -> None:
        self._console.print(text, style="yellow", soft_wrap=True)


class _Lines:
    def __init__(self, console: Console):
        self._console = console
        self._printed: dict[str, tuple[str, str]] = {}  # node -> state and text of its last line
        self._printed_at: dict[str, float] = {}

    def update(self, nodes: Sequence[NodeView]) -> None:
        for node in nodes:
            state, text = self._printed.get(node.name, ("waiting", ""))
            recent = time.monotonic() - self._printed_at.get(node.name, -_LINE_SECONDS) < _LINE_SECONDS
            if node.state == state and (node.text == text or not node.running or recent):
                continue
            self._printed[node.name] = (node.state, node.text)
            self._printed_at[node.name] = time.monotonic()
            what = node.text if node.running and node.text else _WORDS.get(node.state, node.state.lower())
            line = f"{node.name:<18} {duration(node.seconds):>7}  {what}"
            self._console.print(line, soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
