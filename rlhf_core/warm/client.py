"""`python` with a faster start: passes its command line to the warm process, which forks a process to run it.

Run as a script in place of the interpreter, `python -IS client.py SCRIPT …`, or called with `-m MODULE …`. It behaves
like the program itself towards its parent: it forwards signals, ends with the program's exit status, and if it is
killed so is the program. If there is no warm process, or the request is refused, it becomes a plain Python. Imports
little: every import here is part of every start.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

SOCKET_VARIABLE = "ALIGNMENT_WARM_SOCKET"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
RUNNING = b"running"
_CONNECT_SECONDS = 2.0
_REPLY_SECONDS = 10.0


def python_command() -> str | None:
    """Return the command of a warm Python on this node, in place of `sys.executable`; None without a warm process."""
    return f"{sys.executable} -IS {os.path.abspath(__file__)}" if os.environ.get(SOCKET_VARIABLE) else None


def run_warm(arguments: list[str]) -> int | None:
    """Run `python ARGUMENTS` in a fork of the warm process; return its exit status, negative for a signal.

    Returns None, with nothing run, if there is no warm process, or it refuses.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(path)
            _send(connection, arguments)
            connection.settimeout(_REPLY_SECONDS)
            answer = connection.recv(len(RUNNING))  # no more: the program may have ended, and its status follows
            if answer != RUNNING:
                answer += connection.recv(4096)
        except OSError as error:
            print(f"started without the warm process: {error}", file=sys.stderr, flush=True)
            return None
        if answer != RUNNING:
            print(f"started without the warm process: {answer.decode() or 'it ended'}", file=sys.stderr, flush=True)
            return None
        connection.settimeout(None)
        _forward_signals(connection)
        return _status(connection)


def _send(connection: socket.socket, arguments: list[str]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "umask": umask}
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(content)


def _forward_signals(connection: socket.socket) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # where the program has ended: its status is about to be read
            connection.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)


def _status(connection: socket.socket) -> int:
    try:
        answer = connection.recv(64)
    except OSError:
        answer = b""
    return int(answer) if answer else -signal.SIGKILL  # the warm process is gone, with its forks


def main() -> None:
    status = run_warm(sys.argv[1:])
    if status is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606 (our own arguments)
    exit_with(status)


def exit_with(status: int) -> None:
    """End this process as the program ended: with its exit status, or by its signal."""
    if status < 0:
        number = signal.Signals(-status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)


if __name__ == "__main__":
    main()
