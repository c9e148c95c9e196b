"""Runs that a worker took and did not start, for example because it died.

An automation of the server ends them (deployments/stack/automations.py), but not those whose event it has lost, which
happens while its database is locked. So the worker checks too.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

TAG = "alignment"  # of the deployments in prefect.yaml: a server may have other flows too
START = timedelta(minutes=5)  # from the worker's taking a run to its running


def message(start: timedelta = START) -> str:
    return f"a worker took the run and did not start it within {start.total_seconds():.0f} s: run again"


async def end_never_started(client: PrefectClient, start: timedelta = START) -> None:
    """Mark runs as crashed that have been pending for longer than `start`."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING]))
    pending = FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG]), state=state)
    for run in await client.read_flow_runs(flow_run_filter=pending):
        if run.state is not None and datetime.now(UTC) - run.state.timestamp > start:
            with suppress(ObjectNotFound):  # deleted since
                await client.set_flow_run_state(run.id, Crashed(message=message(start)))
