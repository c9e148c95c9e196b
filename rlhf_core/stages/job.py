"""Run of one stage, with its errors as messages and an exit status. Started by __main__.py."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from rlhf_core.actors import forwarding
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.errors import StoppedError, StuckError
from rlhf_core.stages.full_disk import explained
from rlhf_core.stages.runner import run_job
from rlhf_core.system.stopping import STOPS, Stop, grace_seconds
from rlhf_core.system.streams import escape_unknown_signs
from rlhf_core.tracking.protocol import JobError, encode

STOPPED = 128 + signal.SIGTERM
_RESPONSE_SECONDS = 60.0  # of the main thread, which ends ranks and engines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhf_core.stages", description="Compute one artifact.")
    parser.add_argument("--store", required=True, help="s3://bucket/prefix or the path of a folder")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--key", required=True)
    arguments = parser.parse_args()
    _handle_stops(_stop)
    sys.unraisablehook = _stop_again
    escape_unknown_signs()  # a user's error may have some
    try:
        forwarding.receive()
        run_job(arguments.store, ArtifactRef(stage=arguments.stage, key=arguments.key), stop=_end_stuck)
    except (KeyboardInterrupt, StoppedError) as error:
        return _stopped(error)
    except SystemExit as error:
        # Ray replaces our handler of SIGTERM by its own, which exits with the signal's number.
        return _stopped(error) if error.code == signal.SIGTERM else _failed(error)
    except Exception as error:
        # A stop ends processes of the user's code too, or takes a node away: their errors are not the stage's.
        return _failed(error) if STOPS.requested is None else _stopped(error)
    return 0


def _handle_stops(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray's for our jobs, and everybody else's
        signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    if STOPS.between_steps and STOPS.requested is None:
        STOPS.request(Stop("the job was stopped"), grace_seconds())
        return
    _handle_stops(signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt


def _end_stuck(reason: str) -> None:
    """Stop this process, in the thread of its watchdog, or exit if the main thread does not respond.

    A no-op if it is being stopped already: a cancelled job is not to be started again.
    """
    if STOPS.requested is not None:
        return
    STOPS.between_steps = False
    STOPS.request(Stop(reason, StuckError), seconds=0)
    time.sleep(_RESPONSE_SECONDS)
    _print_error(StuckError.__name__, f"{reason}; its main thread did not respond and was ended")
    os._exit(STOPPED)


def _stop_again(dropped: sys.UnraisableHookArgs) -> None:
    """Repeat the stop: Python drops exceptions inside a callback of a weak reference or of C code."""
    sys.__unraisablehook__(dropped)
    if issubclass(dropped.exc_type, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        _handle_stops(_stop)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # not before this callback has ended


def _stopped(error: BaseException) -> int:
    stop = STOPS.requested or Stop("the job was stopped before it had finished")
    message = str(error) if isinstance(error, StoppedError) else f"{stop.reason}; nothing was published"
    if isinstance(error, Exception) and not isinstance(error, StoppedError):
        _print_traceback(error)
    _print_error("Stopped" if stop.error is StoppedError else stop.error.__name__, message)
    return STOPPED


def _failed(error: BaseException) -> int:
    _print_traceback(error)
    explanation = explained(error)
    _print_error(type(explanation).__name__, str(explanation))
    return 1


def _print_traceback(error: BaseException) -> None:
    sys.stderr.flush()
    print(forwarding.redacted("".join(traceback.format_exception(error))), flush=True)


def _print_error(kind: str, message: str) -> None:
    print(encode(JobError(kind, forwarding.redacted(message))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
