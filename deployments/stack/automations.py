"""Automations of the Prefect server that end the runs whose process has died together with its worker.

A worker that detects the death of a flow's process marks the run Crashed. If both die, nothing does, and the run would
stay Running for ever. `alignment up` creates the automations. With a Prefect server and deployments of your own, run
`python -m deployments.stack.automations` once, with PREFECT_API_URL set; running it again is a no-op.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType

from deployments.stack.registration import NEVER_STARTS, NO_HEARTBEAT
from flows.never_started import START, TAG, message

HEARTBEAT = "prefect.flow-run.heartbeat"
HEARTBEAT_SECONDS = 30  # set in prefect.yaml; the least that Prefect allows
SILENCE = timedelta(seconds=80)
SILENT = "the run's process and its worker have died"  # so begins the message, which may be wrong after a suspension
_ENDS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", "AwaitingRetry", "Late",
                                                  "Scheduled", "Paused", "Suspended")}  # fmt: skip


def automations(silence: timedelta = SILENCE, start: timedelta = START) -> list[AutomationCore]:
    """Return the automations. silence: without a heartbeat; start: as in flows/never_started.py."""
    return [
        _crashed(
            NO_HEARTBEAT,
            after={HEARTBEAT},
            expected={HEARTBEAT, *_ENDS},
            within=silence,
            message=f"{SILENT}: no heartbeat for {silence.total_seconds():.0f} s; "
            "run again, jobs that still run are followed and finished stages are reused",
        ),
        _crashed(
            NEVER_STARTS,
            after={"prefect.flow-run.Pending", "prefect.flow-run.Submitting"},
            # Heartbeats too: the server loses events while its database is locked, and a run that runs would be ended.
            expected={"prefect.flow-run.Running", HEARTBEAT, *_ENDS},
            within=start,
            message=message(start),
        ),
    ]


def _crashed(name: str, after: set[str], expected: set[str], within: timedelta, message: str) -> AutomationCore:
    return AutomationCore(
        name=name,
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]}
            ),
            for_each={"prefect.resource.id"},
            after=after,
            expect=expected,
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=message, force=False)],
    )


def create(client: SyncPrefectClient, wanted: list[AutomationCore]) -> None:
    for automation in wanted:
        existing = client.read_automations_by_name(automation.name)
        if not existing:
            client.create_automation(automation)
        elif any(getattr(existing[0], name) != value for name, value in automation):
            client.update_automation(existing[0].id, automation)  # which forgets the runs that it waits for


if __name__ == "__main__":
    with get_client(sync_client=True) as _client:
        create(_client, automations())
