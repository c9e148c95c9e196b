"""The exit codes of all commands. They are stable: scripts and docs/reference/cli.md rely on them."""

from __future__ import annotations

from enum import IntEnum

from rlhf_core.errors import StageError


class ExitCode(IntEnum):
    SUCCESS = 0
    ERROR = 1  # an expected error: the message says what to do
    USAGE = 2  # the command line itself is wrong; nothing was looked at
    RUN_FAILED = 3  # a run was started, and did not complete
    INTERRUPTED = 130  # Ctrl-C


class RunFailedError(StageError):
    """A run was started, and a stage of it failed, or it was cancelled from elsewhere."""


class RunInterruptedError(StageError):
    """A run was cancelled by Ctrl-C in the terminal that follows it."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an expected error."""
    if isinstance(error, RunFailedError):
        return ExitCode.RUN_FAILED
    return ExitCode.INTERRUPTED if isinstance(error, RunInterruptedError) else ExitCode.ERROR
