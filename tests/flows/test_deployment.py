"""The deployments, run by a real worker of the pool, as the UI's buttons and `alignment run` use them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.states import AwaitingRetry, Cancelling

from tests.cluster import ROOT, Service, service_environment
from tests.flows.conftest import NODES, Workplace
from tests.flows.test_running import wait_until

POOL = "alignment"
pytestmark = pytest.mark.parametrize("store_url", ["local"], indirect=True)


def prefect(*arguments: str) -> None:
    command = [str(Path(sys.executable).parent / "prefect"), "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=service_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def client(workplace: Workplace) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def worker(workplace: Workplace) -> Iterator[None]:
    """A worker of the pool, with `few` deployed as `few/test`."""
    prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect("deploy", "tests/flows/few.py:few", "--name", "test", "--pool", POOL)
    command = [str(Path(sys.executable).parent / "prefect"), "worker", "start", "--type", "process", "--pool", POOL,
               "--install-policy", "never"]  # fmt: skip
    service = Service(command, workplace.folder / "worker.log", service_environment(PREFECT_WORKER_QUERY_SECONDS="1"))
    yield
    service.end()


def start(workplace: Workplace) -> FlowRun:
    parameters = {"recipe": workplace.recipe, "nodes": NODES}
    flow_run: Any = run_deployment("few/test", parameters=parameters, timeout=0, as_subflow=False)
    return flow_run


def wait_for(client: SyncPrefectClient, flow_run: FlowRun, *types: StateType) -> FlowRun:
    deadline = time.monotonic() + 120
    while True:
        found = client.read_flow_run(flow_run.id)
        if found.state is not None and found.state.type in types:
            return found
        assert time.monotonic() < deadline, found.state
        time.sleep(0.5)


def test_a_retry_repeats_the_failed_stage_and_nothing_else(
    workplace: Workplace, client: SyncPrefectClient, worker: None
) -> None:
    workplace.write_recipe("needs: '{sign}'")
    failed = wait_for(client, start(workplace), StateType.FAILED, StateType.COMPLETED)
    assert failed.state is not None
    assert "data.words: " in (failed.state.message or "")
    assert "ValueError: there is no sign" in (failed.state.message or "")
    workplace.sign.touch()
    # A run that is scheduled anew while its failed process still ends is taken for a crash by the worker.
    log = workplace.folder / "worker.log"
    wait_until(lambda: f"flow run '{failed.name}' exited with status code" in " ".join(log.read_text().split()))
    time.sleep(3)
    # What the Retry button of the UI sends.
    client.set_flow_run_state(failed.id, AwaitingRetry(message="Retry from the UI"), force=True)
    wait_for(client, failed, StateType.RUNNING)
    done = wait_for(client, failed, StateType.FAILED, StateType.COMPLETED)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    assert (done.id, done.run_count) == (failed.id, 2)
    assert {name: list(workplace.attempts(name).values()) for name in NODES} == {
        "data.test": ["SUCCEEDED"],
        "data.words": ["FAILED", "SUCCEEDED"],
        "base": ["SUCCEEDED"],
    }
    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[done.id])))
    assert sorted((run.name, run.state_name or "") for run in runs) == [
        ("base", "Computed"), ("base", "Reused"), ("data.test", "Computed"), ("data.test", "Reused"),
        ("data.words", "Computed"), ("data.words", "Failed"),
    ]  # fmt: skip


def test_cancelling_stops_the_job(workplace: Workplace, client: SyncPrefectClient, worker: None) -> None:
    workplace.write_recipe("waits_for: '{sign}'")
    flow_run = start(workplace)
    wait_until(lambda: list(workplace.attempts("data.words").values()) == ["RUNNING"])
    client.set_flow_run_state(flow_run.id, Cancelling())
    cancelled = wait_for(client, flow_run, StateType.CANCELLED, StateType.CRASHED, StateType.FAILED)
    assert cancelled.state_name == "Cancelled"
    assert list(workplace.attempts("data.words").values()) == ["STOPPED"]


def test_the_shipped_deployments_register_with_typed_parameters(
    workplace: Workplace, client: SyncPrefectClient
) -> None:
    prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    full = client.read_deployment_by_name("alignment/full")
    alone = client.read_deployment_by_name("stage/stage")
    assert (full.work_pool_name, alone.work_pool_name) == (POOL, POOL)
    assert (full.entrypoint, full.parameters) == ("flows/alignment.py:alignment", {"recipe": "tiny", "overrides": []})
    assert full.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    schema = full.parameter_openapi_schema or {}
    types = {name: (field["type"], "description" in field) for name, field in schema["properties"].items()}
    assert types == {"recipe": ("string", True), "overrides": ("array", True)}
    assert (alone.parameter_openapi_schema or {})["required"] == ["node"]
    assert str(ROOT) not in (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
