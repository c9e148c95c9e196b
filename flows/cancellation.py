"""Detection, within a flow, of the run's cancellation, even without a worker's signal, and of its mark as crashed.

The worker that started a flow's process signals it. That fails if the worker has died, or has lost the process because
two attempts of the run overlapped; so the flow polls the server too. After a suspension of the machine the server has
received nothing from the run for long, and marks it as crashed: a flow that is alive marks it as running again.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Running

POLL_SECONDS = 2.0
_ALIVE = "the run's process is alive: it was suspended, or the server could not be reached"


@contextmanager
def noticed_cancellation(run_id: UUID) -> Iterator[threading.Event]:
    """Yield an event that is set once the run is cancelled.

    A thread polls the server for it, and reports this run as alive.
    """
    cancelled, ended = threading.Event(), threading.Event()
    watching = contextvars.copy_context()  # has Prefect's settings
    thread = threading.Thread(
        target=watching.run, args=(_watch, run_id, cancelled, ended), name=f"state of {run_id}", daemon=True
    )
    thread.start()
    try:
        yield cancelled
    finally:
        ended.set()
        thread.join(timeout=POLL_SECONDS)  # it may be in a request to a server that hangs


def _watch(run_id: UUID, cancelled: threading.Event, ended: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not ended.wait(POLL_SECONDS):
            try:
                state = client.read_flow_run(run_id).state
                if state is not None and state.is_crashed() and not ended.is_set():
                    client.set_flow_run_state(run_id, Running(message=_ALIVE), force=True)
            except ObjectNotFound:  # the run was deleted: no process can follow or cancel it
                cancelled.set()
                return
            except httpx.HTTPError:
                continue  # the server restarts; a run continues without it
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                cancelled.set()
                return
