"""Standard output and standard error of this process."""

from __future__ import annotations

import io
import sys


def escape_unknown_signs() -> None:
    """Write what a stream's encoding lacks as its number, such as \\u2248, where it would be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
