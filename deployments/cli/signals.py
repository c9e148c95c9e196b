"""Signals that end a command."""

from __future__ import annotations

import signal


def end_in_order() -> None:
    """End this command on SIGTERM, or the end of its terminal, as on Ctrl-C, with its engines.

    A partial output is not kept.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below `nohup`
            signal.signal(number, signal.default_int_handler)
