"""The automations of `alignment up`, on a real Prefect server without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Pending, Running, Scheduled

from deployments.stack.automations import HEARTBEAT, automations, create
from flows.never_started import TAG, end_never_started
from tests.flows.few import few
from tests.flows.test_running import wait_until

pytestmark = pytest.mark.endurance("chaos")


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        yield client


@pytest.mark.slow("waits for automations of a Prefect server")
def test_automations_are_created_once(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create(client, automations())
    with monkeypatch.context() as only_read:  # an automation that is updated forgets the runs that it waits for
        only_read.setattr(SyncPrefectClient, "update_automation", None)
        create(client, automations())
    create(client, automations(silence=timedelta(seconds=99)))
    create(client, automations())
    for wanted in automations():
        (found,) = client.read_automations_by_name(wanted.name)
        assert found.enabled
        assert found.trigger == wanted.trigger


@pytest.mark.slow("waits for automations of a Prefect server")
def test_a_run_that_never_starts_is_ended_and_one_with_a_heartbeat_is_not(client: SyncPrefectClient) -> None:
    create(client, automations(start=timedelta(seconds=12)))
    silent, living = [client.create_flow_run(few, state=Scheduled(), tags=[TAG]).id for _ in range(2)]
    for flow_run in (living, silent):
        client.set_flow_run_state(flow_run, Pending())

    def silent_has_ended() -> bool:
        beat(living)  # at every look: a heartbeat before the server has seen the run become Pending counts for nothing
        return client.read_flow_run(silent).state_name == "Crashed"

    wait_until(silent_has_ended)
    assert client.read_flow_run(living).state_name == "Pending"
    create(client, automations())


def test_a_run_that_never_starts_is_ended_by_the_worker_if_the_server_lost_its_event(client: SyncPrefectClient) -> None:
    late, new, other = [
        client.create_flow_run(few, state=Pending(), tags=tags).id for tags in ([TAG], [TAG], ["of another project"])
    ]
    state = client.read_flow_run(new).state
    assert state is not None

    async def look(start: timedelta) -> None:
        async with get_client() as waiting:
            await end_never_started(waiting, start)

    asyncio.run(look(timedelta(minutes=5)))
    assert {client.read_flow_run(run).state_name for run in (late, new, other)} == {"Pending"}
    client.set_flow_run_state(new, Running())
    asyncio.run(look(timedelta(0)))
    assert [client.read_flow_run(run).state_name for run in (late, new, other)] == ["Crashed", "Running", "Pending"]


def beat(flow_run: UUID) -> None:
    run, tag = {"prefect.resource.id": f"prefect.flow-run.{flow_run}"}, {"prefect.resource.id": f"prefect.tag.{TAG}"}
    emit_event(HEARTBEAT, run, related=[tag | {"prefect.resource.role": "tag"}])
