"""Messages to a waiting user."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def printed_after(seconds: float, text: str) -> Iterator[None]:
    """Print `text` to standard error if the context has not ended after `seconds`."""
    timer = threading.Timer(seconds, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
