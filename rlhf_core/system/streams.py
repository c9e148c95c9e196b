"""Standard output and standard error of this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


def escape_unknown_signs() -> None:
    """Escape characters that a stream's encoding lacks, as in \u2248, in place of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def kept_streams() -> Iterator[None]:
    """Keep output of libraries in this process, and print it on standard error if the context ends with an error."""
    kept = io.StringIO()
    try:
        with redirect_stdout(kept), redirect_stderr(kept):
            yield
    except Exception:
        sys.stderr.write(kept.getvalue())
        raise
