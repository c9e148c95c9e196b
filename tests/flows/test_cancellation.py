"""A run whose process is alive while the server says something else, on a real Prefect server without a worker."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.following import _FollowedRun
from deployments.cli.live_view import view
from deployments.cli.main import app
from deployments.stack.automations import SILENT
from flows.alignment import alignment
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


def test_an_unfinished_run_is_listed_and_cancelled_from_the_command_line(
    client: SyncPrefectClient, prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    parameters = {"recipe": "/somewhere/mine.yaml", "overrides": ["seed=1"]}
    run = client.create_flow_run(alignment, parameters=parameters, state=Running()).id

    def answer() -> None:
        wait_until(lambda: client.read_flow_run(run).state_name == "Cancelling")
        client.set_flow_run_state(run, Cancelled(), force=True)

    def said(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--json"])

    listed = json.loads(said("runs", "--recipe", "mine").stdout)["runs"]
    assert [(line["run"], line["outcome"], line["settings"]) for line in listed] == [(str(run), "running", ["seed=1"])]
    process = threading.Thread(target=answer)
    process.start()
    done = said("cancel", str(run))
    process.join()
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"run": str(run), "state": "Cancelled"})
    assert f"the run {run} has ended already (Cancelled)" in said("cancel", str(run)).stderr
    assert "Prefect knows no run `mine`: `alignment runs` lists runs" in said("cancel", "mine").stderr
