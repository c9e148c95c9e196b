"""Worker processes of a reward server on one address, restarted when they die. Does not import torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

from rlhf_core.errors import AlignmentError, StageError
from rlhf_core.reward_server.settings import Serving

if TYPE_CHECKING:
    from aiohttp import web

_STOP_SECONDS = 60.0  # for running requests
_RESTART_SECONDS = 0.5  # between the death of a worker and the start of the next
_STOPS = (signal.SIGINT, signal.SIGTERM)
_FAILED_START = 3  # exit status of a worker whose application failed to load
# Workers end by a signal. Python's resource tracker then removes their semaphores, with a warning.
_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"


def reward_application(serving: Serving) -> web.Application:
    """Return the application of a worker. Imports its modules here, so that the supervisor does not import torch."""
    from rlhf_core.reward_server.app import reward_app

    return reward_app(serving)


def serve(application: Callable[[], web.Application], listener: socket.socket, workers: int) -> None:
    """Serve requests at `listener` until SIGINT or SIGTERM; running requests are completed first.

    application: called in each worker process, to which it is sent pickled, through a pipe.
    Raises StageError if a worker cannot start.
    """
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKER)))
    stopped, stop = multiprocessing.Pipe(duplex=False)
    with ExitStack() as stack:
        for number in _STOPS:
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: stop.send_bytes(b"")))
        processes: list[SpawnProcess] = []
        stack.callback(_end, processes)
        processes += (_start_worker(application, listener) for _ in range(workers))
        _supervise(processes, stopped, lambda: _start_worker(application, listener))


def _supervise(processes: list[SpawnProcess], stopped: Connection, start: Callable[[], SpawnProcess]) -> None:
    """Restart workers that die, until `stopped` is readable."""
    while stopped not in wait([stopped, *(process.sentinel for process in processes)]):
        for index, process in enumerate(processes):
            if process.exitcode == _FAILED_START:  # the others would fail in the same way
                raise StageError("the reward server could not start: its workers say why above")
            if process.exitcode is not None and not stopped.poll(_RESTART_SECONDS):
                processes[index] = start()


def _start_worker(application: Callable[[], web.Application], listener: socket.socket) -> SpawnProcess:
    """Start a worker. It inherits the blocked SIGINT: Ctrl-C reaches it as the supervisor's SIGTERM."""
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(application, listener))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return process


def _end(processes: list[SpawnProcess]) -> None:
    """Terminate workers, and kill those still running after the timeout. A worker that is loading ends at once."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS + 5.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _work(application: Callable[[], web.Application], listener: socket.socket) -> None:
    """Run a worker: load the application, then serve until SIGTERM."""
    from aiohttp import web

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        app = application()
    except AlignmentError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_FAILED_START)
    except Exception:
        traceback.print_exc()
        sys.exit(_FAILED_START)
    web.run_app(app, sock=listener, access_log=None, print=None, shutdown_timeout=_STOP_SECONDS)


def _end_with_parent() -> None:
    """Shut down when the supervisor has ended: nothing else would stop or restart this worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
