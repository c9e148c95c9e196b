"""Reason for which a run does not advance, in one sentence."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound

from deployments.stack.automations import HEARTBEAT, HEARTBEAT_SECONDS, SILENCE

START_SECONDS = 20.0  # that a worker may take to start a run without a note
_WORKER_HEARTBEAT_SECONDS = 30.0


def awaited(client: SyncPrefectClient, flow_run: FlowRun, now: datetime | None = None) -> str:
    """Return the reason for which the run waits; empty if nothing is unusual."""
    state = flow_run.state
    if state is None or state.is_final() or state.is_cancelling():
        return ""
    now = now or datetime.now(UTC)
    waited = (now - state.timestamp).total_seconds()
    if state.is_running():
        return _silence(client, flow_run, now) if waited > 2 * HEARTBEAT_SECONDS else ""
    if waited < START_SECONDS:
        return ""
    if state.is_pending():
        return "a worker has taken the run, whose process does not start: see `alignment status` and the worker's log"
    if state.is_scheduled():
        return _worker(client, flow_run, now)
    return f"the run is {state.name}"


def _silence(client: SyncPrefectClient, flow_run: FlowRun, now: datetime) -> str:
    page = client.read_events(
        EventFilter(
            event=EventNameFilter(name=[HEARTBEAT]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run.id}"]),
        ),
        limit=1,
    )
    if not page.events:
        return ""  # of a server without events
    last = page.events[0].occurred
    if (now - last).total_seconds() < 1.5 * HEARTBEAT_SECONDS:
        return ""
    return (
        f"no heartbeat of the run's process since {last.astimezone():%H:%M:%S}: it may have died with its worker; "
        f"after {SILENCE.total_seconds():.0f} s the run is marked as crashed"
    )


def _worker(client: SyncPrefectClient, flow_run: FlowRun, now: datetime) -> str:
    pool = flow_run.work_pool_name or ""
    try:
        workers = client.read_workers_for_work_pool(pool) if pool else []
    except ObjectNotFound:
        workers = []
    polled = [worker.last_heartbeat_time for worker in workers if worker.last_heartbeat_time is not None]
    if not polled:
        return f"no worker polls the work pool `{pool}`: see `alignment status`, or start one with `alignment up`"
    last = max(polled)
    if (now - last).total_seconds() > 2 * _WORKER_HEARTBEAT_SECONDS:
        return (
            f"no worker has polled the work pool `{pool}` since {last.astimezone():%H:%M:%S}: "
            "see `alignment status`, or start one with `alignment up`"
        )
    return f"the worker of the pool `{pool}` has not taken the run yet (its limit of runs, or it has just died)"
