"""Runs as the Prefect server knows them: the newest, and one by its id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from deployments.cli.documents.results import RunLine
from deployments.cli.prefect_server import answers_of
from rlhf_core.errors import StackError

_FLOWS = ("alignment", "iterative-dpo", "stage")
_SECONDS = 3.0  # Prefect's own client would ask for a minute


def newest_runs(limit: int) -> list[RunLine]:
    """Return the newest runs of recipes; empty if no server is configured. Raises StackError if it does not answer."""
    api = get_current_settings().api.url
    if not api:
        return []
    with answers_of(api):
        httpx.get(f"{api}/health", timeout=_SECONDS)
        with get_client(sync_client=True) as client:
            flows = FlowFilter(name=FlowFilterName(any_=[*_FLOWS]))
            found = client.read_flow_runs(flow_filter=flows, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=limit)
    return [_line(flow_run) for flow_run in found]


def read_run(client: SyncPrefectClient, text: str) -> FlowRun:
    """Return the run with this id. Raises StackError if there is none."""
    try:
        return client.read_flow_run(UUID(text))
    except (ValueError, ObjectNotFound) as error:
        raise StackError(f"Prefect knows no run `{text}`: `alignment runs` lists runs by their id") from error


def _line(flow_run: FlowRun) -> RunLine:
    parameters = flow_run.parameters
    overrides, tags = (parameters.get(name) or () for name in ("overrides", "tags"))
    started = flow_run.start_time or flow_run.expected_start_time
    ended = flow_run.state is not None and flow_run.state.is_final()
    return RunLine(
        run=str(flow_run.id),
        recipe=Path(str(parameters.get("recipe", ""))).stem,
        settings=_texts(overrides),
        outcome=(flow_run.state_name or "unknown").lower(),
        started=started,
        seconds=flow_run.total_run_time.total_seconds() if ended else flow_run.estimated_run_time.total_seconds(),
        failed_stages=[],
        tags=_texts(tags),
    )


def _texts(parameter: object) -> list[str]:
    """Return a list that a person gave in Prefect's form, which may be anything."""
    return [str(each) for each in parameter] if isinstance(parameter, Sequence) else []
