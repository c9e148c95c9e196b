"""The signals that end a command."""

from __future__ import annotations

import signal


def end_in_order() -> None:
    """A SIGTERM, or the end of its terminal, ends this command as Ctrl-C does: with its engines, and without what it
    has half written."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below `nohup`
            signal.signal(number, signal.default_int_handler)
