"""Becomes another program, which the kernel kills when the process that has started this one ends.

Run as a file, with the folder of our code, that process's id, and the command.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from rlhf_core.processes.fork_server import end_with

    end_with(int(sys.argv[2]))
    try:
        os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606  the command of a recipe
    except OSError as error:
        sys.exit(f"{sys.argv[3]} cannot be started: {error.strerror}")
