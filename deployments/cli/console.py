"""Where commands print."""

from __future__ import annotations

import sys

from rich.console import Console


def wide_console() -> Console:
    """For tables with paths, which stay whole where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 300)
