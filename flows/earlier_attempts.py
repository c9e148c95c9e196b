"""The task runs of a run's earlier attempts, which Prefect keeps beside those of the attempt that a Retry starts."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import Cancelled, Crashed

_OPEN = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)

_KILLED: State[None] = Crashed(
    message="the process of this attempt ended before the stage; a later attempt has its own"
)
_NOT_RUN: State[None] = Cancelled(name="NotRun", message="this attempt ended before the stage could begin")


def close_earlier_attempts(run_id: UUID) -> None:
    """Close the task runs of earlier attempts, before an attempt's first task.

    Tasks that waited for a failed stage, or that a killed process ran, would otherwise stay unfinished in Prefect for
    ever.
    """
    open_runs = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[*_OPEN]), name=None))
    of_this_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        for task_run in client.read_task_runs(flow_run_filter=of_this_run, task_run_filter=open_runs):
            began = task_run.state is not None and task_run.state.is_running()
            client.set_task_run_state(task_run.id, _KILLED if began else _NOT_RUN, force=True)
