"""Start of every service by supervisord: ends the leftovers of a killed predecessor and becomes the service.

When Ray's head is killed, its agents and jobs survive for a while and hold the ports that the next head needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deployments.stack.files import read_pid
from deployments.stack.processes import MARKER, end, processes_of


def main(arguments: list[str]) -> None:
    """arguments: the command, optionally after `--keep-leftovers`."""
    folder, _, service = os.environ[MARKER].rpartition(":")
    record = Path(folder) / f"{service}.pid"
    if arguments[0] == "--keep-leftovers":
        arguments = arguments[1:]
    else:
        predecessor = read_pid(record, "remove it")
        if predecessor is not None and predecessor != os.getpid():
            end(processes_of(Path(folder), service, sessions=[predecessor]))
    record.write_text(str(os.getpid()))
    os.umask(0o077)  # also the sockets that a service makes in a folder of everyone
    os.execv(arguments[0], arguments)  # noqa: S606 (the command is supervisord.conf's)


if __name__ == "__main__":
    main(sys.argv[1:])
