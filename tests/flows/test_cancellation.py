"""A run whose process is alive while the server says something else, on a real Prefect server without a worker."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Crashed, Running
from rich.console import Console

from deployments.cli.following import _FollowedRun
from deployments.cli.live_view import view
from deployments.stack.automations import SILENT
from flows.cancellation import noticed_cancellation
from tests.flows.few import few
from tests.flows.test_running import wait_until

pytestmark = pytest.mark.endurance("chaos")


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        yield client


def test_a_run_that_counts_as_crashed_is_running_again_while_its_process_is_alive(client: SyncPrefectClient) -> None:
    run = client.create_flow_run(few, state=Running()).id
    with noticed_cancellation(run) as cancelled:
        client.set_flow_run_state(run, Crashed(message=SILENT), force=True)
        wait_until(lambda: client.read_flow_run(run).state_name == "Running")
        assert not cancelled.is_set()
        client.set_flow_run_state(run, Cancelling(), force=True)
        assert cancelled.wait(20)
    client.set_flow_run_state(run, Crashed(message=SILENT), force=True)
    time.sleep(3)
    assert client.read_flow_run(run).state_name == "Crashed"


def test_a_run_that_was_deleted_is_cancelled(client: SyncPrefectClient) -> None:
    """No one can follow it any more, or cancel it."""
    run = client.create_flow_run(few, state=Running()).id
    with noticed_cancellation(run) as cancelled:
        client.delete_flow_run(run)
        assert cancelled.wait(20)


def test_a_silent_run_is_followed_until_its_process_has_had_time_to_answer(client: SyncPrefectClient) -> None:
    run = client.create_flow_run(few, state=Crashed(message=f"{SILENT}: no heartbeat")).id

    def answer() -> None:
        time.sleep(3)
        client.set_flow_run_state(run, Running(), force=True)
        time.sleep(3)
        client.set_flow_run_state(run, Completed(), force=True)

    answering = threading.Thread(target=answer)
    answering.start()
    with view(Console(file=io.StringIO())) as shown:
        assert _FollowedRun(client, run, [], shown).follow().name == "Completed"
    answering.join()
