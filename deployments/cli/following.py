"""Run of a deployment, with its state in Prefect shown in the terminal.

The flow runs as a deployment and not in this process. So the run is the same as one started in the UI: it can be
retried there, it survives a closed terminal, and `alignment run` shows only Prefect's state. The cost is the start
of a worker, a few seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from rich.console import Console

from deployments.cli.cancelling import cancel_run, is_unavailable
from deployments.cli.live_view import NodeView, View, view
from deployments.cli.prefect_server import answers_of, asking_for, prefect_api
from deployments.cli.waiting import awaited
from deployments.stack.automations import SILENT
from rlhf_core.errors import StackError
from tasks.run_progress import StageProgress, stages_of

_CTRL_C = "Ctrl-C in the terminal"
_POLL_SECONDS = 1.0
_ASK_SECONDS = 5.0  # between two checks of the reason for waiting
_REVIVAL_SECONDS = 10.0  # that a process has to say that it is alive, although it was silent for long
_LOST_SECONDS = 60.0  # after which a Prefect server that does not answer counts as lost


@dataclass(frozen=True, slots=True)
class Ended:
    run_id: str
    succeeded: bool
    state: str  # its name in Prefect
    message: str
    url: str
    interrupted: bool = False  # by Ctrl-C in this terminal


def follow(deployment: str, parameters: Mapping[str, Any], nodes: Sequence[str], console: Console) -> Ended:
    """Start a run of the deployment and follow it to its end. Ctrl-C cancels it and stops its jobs; a second exits.

    Raises StackError if there is no Prefect server, it has no such deployment, or the connection to it is lost, and
    if jobs could not be stopped.
    """
    api = prefect_api()
    interrupted = False
    run_id = _start(api, deployment, parameters)
    url = f"{api.removesuffix('/api')}/runs/flow-run/{run_id}"
    console.print(f"run {url}", soft_wrap=True, highlight=False)
    with answers_of(api), get_client(sync_client=True) as client, view(console) as run_view:
        run = _FollowedRun(client, run_id, nodes, run_view)
        try:
            state = run.follow()
        except KeyboardInterrupt:
            interrupted = True
            run_view.note("cancelling: waiting for the jobs to stop (Ctrl-C again exits without waiting)")
            try:
                state = cancel_run(client, run_id, _CTRL_C, run_view.note)
            except KeyboardInterrupt as error:
                raise StackError(f"not waiting for the jobs to stop: see {url}") from error
        except ObjectNotFound as error:
            raise StackError(
                f"the run {run_id} was deleted in Prefect, and its process stops its jobs: run again to resume"
            ) from error
    return Ended(str(run_id), state.is_completed(), state.name or "", _reason(state), url, interrupted)


def _reason(state: State) -> str:
    """Return the message of the error that the flow raised, without the prefix that Prefect adds."""
    # A run that no worker has taken yet is cancelled by the server, which keeps no message.
    message = state.message or ("before a worker took the run" if state.is_cancelled() else "no reason given")
    raised = re.fullmatch(r"Flow run encountered an exception: \w+: (.*)", message, re.DOTALL)
    return raised[1] if raised else f"{state.name}: {message}"


def _start(api: str, deployment: str, parameters: Mapping[str, Any]) -> UUID:
    with asking_for(deployment, api):
        flow_run = run_deployment(deployment, parameters=dict(parameters), timeout=0, as_subflow=False)
    assert isinstance(flow_run, FlowRun), "run_deployment is synchronous outside an event loop"
    return flow_run.id


class _FollowedRun:
    def __init__(self, client: SyncPrefectClient, run_id: UUID, nodes: Sequence[str], run_view: View):
        self._client = client
        self._run_id = run_id
        self._nodes = nodes
        self._view = run_view
        self._noted = ""
        self._asked_at = time.monotonic()

    def follow(self) -> State:
        """Show the run until its state is final; return that state."""
        failing_since: float | None = None  # not since the last answer: this process may have been suspended
        crashed_since: float | None = None
        while True:
            try:
                flow_run = self._client.read_flow_run(self._run_id)
                self._view.update(self._snapshot())
                failing_since = None
                if flow_run.state is not None and flow_run.state.is_final():
                    crashed_since = crashed_since or time.monotonic()
                    waited = time.monotonic() - crashed_since
                    if not _may_be_alive(flow_run.state) or waited > _REVIVAL_SECONDS:
                        return flow_run.state
                else:
                    crashed_since = None
                self._note_what_it_waits_for(flow_run)
            except httpx.HTTPError as error:
                if not is_unavailable(error):
                    raise
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _LOST_SECONDS:
                    raise StackError(
                        f"lost the Prefect server ({error}); the run {self._run_id} may still be running, see "
                        "`alignment status`"
                    ) from error
            time.sleep(_POLL_SECONDS)

    def _note_what_it_waits_for(self, flow_run: FlowRun) -> None:
        if time.monotonic() - self._asked_at < _ASK_SECONDS:
            return
        self._asked_at = time.monotonic()
        waits_for = awaited(self._client, flow_run)
        if waits_for and waits_for != self._noted:
            self._view.note(waits_for)
        self._noted = waits_for

    def _snapshot(self) -> list[NodeView]:
        of_this_run = FlowRunFilter(id=FlowRunFilterId(any_=[self._run_id]))
        newest: dict[str, TaskRun] = {}
        for task_run in self._client.read_task_runs(flow_run_filter=of_this_run):
            previous = newest.get(task_run.name)
            if previous is None or _started_at(task_run) >= _started_at(previous):
                newest[task_run.name] = task_run
        artifacts = self._client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._run_id]), type=ArtifactFilterType(any_=["progress"])
            )
        )
        of_attempts = sorted(artifacts, key=lambda artifact: artifact.created or datetime.min.replace(tzinfo=UTC))
        progress = stages_of(of_attempts[-1].description or "") if of_attempts else {}
        return [_node_view(name, newest.get(name), progress.get(name)) for name in self._nodes]


def _may_be_alive(state: State) -> bool:
    """Return whether the server infers the end of the run from silence alone."""
    return state.is_crashed() and (state.message or "").startswith(SILENT)


def _started_at(task_run: TaskRun) -> float:
    return task_run.start_time.timestamp() if task_run.start_time else 0.0


def _node_view(name: str, task_run: TaskRun | None, progress: StageProgress | None) -> NodeView:
    if task_run is None or task_run.state_name in (None, "Pending"):
        return NodeView(name, "waiting", 0.0, None, "")
    percent, text = (None, "") if progress is None else (progress.percent, progress.text)
    return NodeView(name, task_run.state_name or "", task_run.estimated_run_time.total_seconds(), percent, text)
