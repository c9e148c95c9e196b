"""Run of one stage, with its errors as messages and an exit status. Started by __main__.py."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from types import FrameType

from rlhf_core.actors import forwarding
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.stages.full_disk import explained
from rlhf_core.stages.runner import run_job
from rlhf_core.system.streams import escape_unknown_signs
from rlhf_core.tracking.protocol import JobError, encode

STOPPED = 128 + signal.SIGTERM


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhf_core.stages", description="Compute one artifact.")
    parser.add_argument("--store", required=True, help="s3://bucket/prefix or the path of a folder")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--key", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    sys.unraisablehook = _stop_again
    escape_unknown_signs()  # a user's error may have some
    try:
        forwarding.receive()
        run_job(arguments.store, ArtifactRef(stage=arguments.stage, key=arguments.key))
    except KeyboardInterrupt:
        _print_error("Stopped", "the job was stopped before it had finished; nothing was published")
        return STOPPED
    except SystemExit as error:
        # Ray replaces our handler of SIGTERM by its own, which exits with the signal's number.
        if error.code == signal.SIGTERM:
            _print_error("Stopped", "the job was stopped before it had finished; nothing was published")
            return STOPPED
        return _failed(error)
    except Exception as error:
        return _failed(error)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt


def _stop_again(dropped: sys.UnraisableHookArgs) -> None:
    """Repeat the stop: Python drops exceptions inside a callback of a weak reference or of C code."""
    sys.__unraisablehook__(dropped)
    if issubclass(dropped.exc_type, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # not before this callback has ended


def _failed(error: BaseException) -> int:
    sys.stderr.flush()
    print(forwarding.redacted("".join(traceback.format_exception(error))), flush=True)
    explanation = explained(error)
    _print_error(type(explanation).__name__, str(explanation))
    return 1


def _print_error(kind: str, message: str) -> None:
    print(encode(JobError(kind, forwarding.redacted(message))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
