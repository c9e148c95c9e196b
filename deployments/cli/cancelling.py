"""Cancellation of a run, with its jobs stopped from here if no process of the run does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling

from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.errors import AlignmentError, StackError
from rlhf_core.system.stopping import grace_seconds
from tasks.ray_jobs import connect
from tasks.stage import stop_jobs_of

_CANCEL_SECONDS = 12.0  # that the run's own process has to stop its jobs
_POLL_SECONDS = 1.0


def cancel_run(client: SyncPrefectClient, run_id: UUID, why: str, note: Callable[[str], None]) -> State:
    """Cancel the run and return its state. Stops its jobs itself if no process of the run does.

    Raises StackError if jobs may still be running, or the server's state could not be set.
    """
    try:
        client.set_flow_run_state(run_id, Cancelling(message=why))
        limit = time.monotonic() + _CANCEL_SECONDS + grace_seconds()
        while time.monotonic() < limit:
            state = client.read_flow_run(run_id).state
            if state is not None and state.is_final():
                return state
            time.sleep(_POLL_SECONDS)
    except httpx.HTTPError as error:
        if not is_unavailable(error):
            raise
        _stop_jobs(run_id)
        raise StackError(
            f"the run's jobs are stopped, but no Prefect server answers ({error}): its state is as it was"
        ) from error
    note("no process of the run answers: stopping its jobs from here")
    cancelled: State = Cancelled(message=f"{why}; no process of the run answered")
    try:
        _stop_jobs(run_id)
    finally:
        client.set_flow_run_state(run_id, cancelled, force=True)
    return cancelled


def is_unavailable(error: httpx.HTTPError) -> bool:
    """Return whether there is no response, or that of an overloaded or restarting server."""
    return not isinstance(error, httpx.HTTPStatusError) or error.response.status_code >= 500


def _stop_jobs(run_id: UUID) -> None:
    try:
        stop_jobs_of(str(run_id), open_store(store_url()), connect(patience=_CANCEL_SECONDS / 2))
    except AlignmentError as error:
        raise StackError(f"the jobs of the run {run_id} may still be running ({error}): see `ray job list`") from error
