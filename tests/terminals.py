"""A program in a real pseudo-terminal, with somebody who answers its prompts or presses keys. Import it as
tests.terminals.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.cells import cell_len

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


class Screen:
    """A program that redraws its whole screen from the top, with somebody who presses keys and waits to see a text."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, rows: int = 40, columns: int = 300):
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            try:
                os.execve(command[0], list(command), dict(environment))
            finally:
                os._exit(127)
        self._status: int | None = None
        self.received = ""
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str, awaited: str, seconds: float = 60) -> str:
        """The screen that has `awaited`, with single spaces, after these keys."""
        before = len(self.received)
        os.write(self._terminal, keys.encode())
        until = time.monotonic() + seconds
        while True:
            frames = self.received[before:].split("\x1b[1;1H")[1:]
            shown = [text for frame in frames if (text := self._text(frame)) is not None and awaited in text]
            if shown:
                return shown[-1]
            assert self._read(until), f"no `{awaited}` in {self.received[before:]!r}"

    def end(self, keys: str, seconds: float = 60) -> int:
        """Exit status, after these keys."""
        os.write(self._terminal, keys.encode())
        until = time.monotonic() + seconds
        while self._read(until):
            pass
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        return self._status

    def close(self) -> None:
        """End the program, if it has not ended, and the terminal."""
        if self._status is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        os.close(self._terminal)

    def is_canonical(self) -> bool:
        """Whether the terminal collects lines and echoes them, as a shell expects it."""
        return termios.tcgetattr(self._terminal)[3] & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO

    def _text(self, frame: str) -> str | None:
        """The lines of a frame with single spaces; None: its last line has not arrived in full."""
        plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"\x1b\[\d+;1H", frame)]
        if len(plain) < self._rows or cell_len(plain[self._rows - 1]) < self._columns:
            return None
        return "\n".join(" ".join(line.split()) for line in plain)

    def _read(self, until: float) -> bool:
        """Wait for output; False once the program has ended, or it is too late."""
        if not select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))[0]:
            return False
        data = b""
        with suppress(OSError):  # Linux: the other end is closed
            data = os.read(self._terminal, 1 << 16)
        self.received += data.decode(errors="replace")
        return bool(data)
