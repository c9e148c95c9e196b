"""A program in a real pseudo-terminal, with somebody who answers its prompts. Import it as tests.terminals."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROMPT = "(Pdb) "


def in_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], answers: Iterator[str], seconds: float = 300
) -> tuple[int, str]:
    """Exit status and all that was shown. Each prompt of a debugger gets the next of the answers."""
    process, terminal = pty.fork()
    if process == 0:
        try:
            os.chdir(folder)
            os.execve(command[0], list(command), dict(environment))
        finally:
            os._exit(127)
    shown, answered, until = "", 0, time.monotonic() + seconds
    with os.fdopen(terminal, "r+b", buffering=0) as file:
        while select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
            received = b""
            with suppress(OSError):  # Linux: the other end is closed
                received = os.read(terminal, 1 << 16)
            if not received:
                break
            shown += received.decode(errors="replace")
            while shown.count(PROMPT) > answered:
                answered += 1
                file.write(f"{next(answers)}\n".encode())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown.replace("\r\n", "\n")
