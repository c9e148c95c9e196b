"""The console of the commands."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDE = 300  # characters: tables with paths stay whole where the output is no terminal


def _width() -> int | None:
    return None if sys.stdout is not None and sys.stdout.isatty() else _WIDE


# The only one: it prints the text of users and stores as it is, where rich would read `[/red]` and `:warning:` as
# markup. What is coloured has a style.
console = Console(markup=False, emoji=False, width=_width())
