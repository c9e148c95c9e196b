"""How a flow notices that its run is cancelled, even where no worker tells it.

The worker that started a flow's process signals it. That fails if the worker has died, or has lost the process because
two attempts of the run overlapped; so the flow asks the server too.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client

POLL_SECONDS = 2.0


@contextmanager
def noticed_cancellation(run_id: UUID) -> Iterator[threading.Event]:
    """Yields an event that is set once the run is cancelled, by a thread that polls the server."""
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
            except httpx.HTTPError:
                continue  # the server restarts; a run continues without it
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                cancelled.set()
                return
