"""The deployments, run by a real worker of the pool: from a terminal, and as the UI's buttons do."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import Result
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.deployments.runner import EntrypointType
from prefect.events import emit_event
from prefect.states import AwaitingRetry, Cancelling, Pending, Running
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.waiting import awaited
from deployments.stack.automations import HEARTBEAT_SECONDS
from flows.never_started import TAG
from tests.cluster import ROOT, Service, service_environment
from tests.flows.conftest import NODES, Workplace
from tests.flows.few import few
from tests.flows.test_running import artifacts, newest_run, wait_until
from tests.services import S3Server, s3_prefix

pytestmark = pytest.mark.system

POOL = "alignment"
UNEXPECTED = (StateType.CRASHED, StateType.COMPLETED)
PREFECT = str(Path(sys.executable).parent / "prefect")
SMALLEST = """
name: smallest
data: {unused: {format: text, source: {type: hub, repository: some/set}}}
base:
  dtype: float32
  source: {type: scratch, words: [WORD], hidden_size: 64, intermediate_size: 64, layers: 1, heads: 2}
"""


@pytest.fixture(scope="module")
def store_url(s3_server: S3Server) -> Iterator[str]:
    """One for all, since a worker's flows have the worker's environment."""
    with pytest.MonkeyPatch.context() as patch:
        yield s3_prefix(s3_server, patch)


@pytest.fixture(scope="module")
def worker(
    store_url: str, ray_address: str, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A worker of the pool for the shipped deployments and for `few`, deployed as `few/test`; the path of its log."""
    folder = tmp_path_factory.mktemp("worker")
    environment = service_environment(
        ALIGNMENT_STORE=store_url, RAY_API_SERVER_ADDRESS=ray_address, PREFECT_API_URL=prefect_api,
        PREFECT_HOME=str(folder), PREFECT_WORKER_QUERY_SECONDS="1",
    )  # fmt: skip
    for arguments in (
        ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
        ["deploy", "--all", "--prefect-file", "deployments/prefect.yaml"],
        [
            "deploy",
            "tests/flows/few.py:few",
            "--name",
            "test",
            "--pool",
            POOL,
            "--job-variable",
            "command=python -m flows.process",
        ],
    ):
        command = [PREFECT, "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    start = [sys.executable, "-m", "flows.worker", "--pool", POOL]
    service = Service(start, folder / "log", environment)
    yield folder / "log"
    service.end()


@pytest.fixture
def client(workplace: Workplace) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def start(workplace: Workplace) -> FlowRun:
    parameters = {"recipe": workplace.recipe, "nodes": NODES}
    flow_run: Any = run_deployment("few/test", parameters=parameters, timeout=0, as_subflow=False)
    return flow_run


def wait_for(client: SyncPrefectClient, flow_run: FlowRun, *types: StateType, every_seconds: float = 0.5) -> FlowRun:
    deadline = time.monotonic() + 120
    while True:
        found = client.read_flow_run(flow_run.id)
        if found.state is not None and found.state.type in types:
            return found
        assert time.monotonic() < deadline, found.state
        time.sleep(every_seconds)


def retry(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """What the Retry button of the UI sends."""
    client.set_flow_run_state(flow_run.id, AwaitingRetry(message="Retry from the UI"), force=True)


@pytest.mark.slow("runs a recipe by a worker of Prefect")
def test_a_retry_at_once_repeats_the_failed_stage_and_nothing_else(
    workplace: Workplace, client: SyncPrefectClient, worker: Path
) -> None:
    """At once, while the process of the failed attempt still ends: the worker knows both by the run's id alone."""
    started = workplace.folder / "started"
    workplace.write_recipe(f"needs: '{{sign}}', waits_for: '{started}'")
    flow_run = start(workplace)
    for attempt in (1, 2):
        failed = wait_for(client, flow_run, StateType.FAILED, *UNEXPECTED)
        assert failed.run_count == attempt
        message = (failed.state.message if failed.state else None) or ""
        assert "data.words: " in message
        assert "ValueError: there is no sign" in message
        assert "full log: `ray job logs dataset-" in message
        assert workplace.manifest("data.words") is None
        if attempt == 2:
            workplace.sign.touch()
        retry(client, failed)
        wait_for(client, failed, StateType.RUNNING, *UNEXPECTED)

    wait_until(lambda: list(workplace.attempts("data.words").values())[-1:] == ["RUNNING"])
    client.set_flow_run_state(flow_run.id, Cancelling())
    cancelled = wait_for(client, flow_run, StateType.CANCELLED, *UNEXPECTED)
    assert cancelled.state_name == "Cancelled"
    assert list(workplace.attempts("data.words").values()) == ["FAILED", "FAILED", "STOPPED"]
    retry(client, cancelled)
    started.touch()
    wait_for(client, cancelled, StateType.RUNNING)
    done = wait_for(client, cancelled, StateType.COMPLETED, StateType.FAILED, *UNEXPECTED)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    assert (done.id, done.run_count) == (flow_run.id, 4)
    assert {name: list(workplace.attempts(name).values()) for name in NODES} == {
        "data.test": ["SUCCEEDED"],
        "data.words": ["FAILED", "FAILED", "STOPPED", "SUCCEEDED"],
        "base": ["SUCCEEDED"],
    }
    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[done.id])))
    states = sorted((run.name, run.state_name or "") for run in runs if run.name != "data.words")
    assert states == [("base", "Computed"), *3 * [("base", "Reused")],
                      ("data.test", "Computed"), *3 * [("data.test", "Reused")]]  # fmt: skip


@pytest.mark.slow("runs a recipe by a worker of Prefect")
def test_a_retry_at_once_of_a_run_whose_process_was_killed_attaches_to_its_job(
    workplace: Workplace, client: SyncPrefectClient, worker: Path
) -> None:
    workplace.write_recipe("waits_for: '{sign}'")
    flow_run = start(workplace)
    wait_until(lambda: list(workplace.attempts("data.words").values()) == ["RUNNING"])
    for _ in range(2):
        for process in psutil.process_iter(["cmdline", "environ"]):
            if (process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                process.kill()
        crashed = wait_for(client, flow_run, StateType.CRASHED, every_seconds=0.01)
        retry(client, crashed)
        wait_for(client, crashed, StateType.RUNNING)
    workplace.sign.touch()
    done = wait_for(client, crashed, StateType.COMPLETED, StateType.FAILED, *UNEXPECTED)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    assert list(workplace.attempts("data.words").values()) == ["SUCCEEDED"]
    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[done.id])))
    assert [run.name for run in runs if run.state is None or not run.state.is_final()] == []


@pytest.mark.slow("runs a recipe by a worker of Prefect")
def test_cancelling_stops_the_job(workplace: Workplace, client: SyncPrefectClient, worker: Path) -> None:
    workplace.write_recipe("waits_for: '{sign}'")
    flow_run = start(workplace)
    wait_until(lambda: list(workplace.attempts("data.words").values()) == ["RUNNING"])
    client.set_flow_run_state(flow_run.id, Cancelling())
    cancelled = wait_for(client, flow_run, StateType.CANCELLED, StateType.CRASHED, StateType.FAILED)
    assert cancelled.state_name == "Cancelled"
    assert list(workplace.attempts("data.words").values()) == ["STOPPED"]


def test_the_shipped_deployments_register_with_typed_parameters(client: SyncPrefectClient, worker: Path) -> None:
    full = client.read_deployment_by_name("alignment/full")
    alone = client.read_deployment_by_name("stage/stage")
    assert (full.work_pool_name, alone.work_pool_name) == (POOL, POOL)
    assert (full.entrypoint, full.parameters) == ("flows/alignment.py:alignment", {"recipe": "tiny", "overrides": []})
    assert full.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    for deployment in (full, alone):
        assert deployment.tags == [TAG]
        assert deployment.job_variables == {
            "command": "python -m flows.process",
            "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)},
        }
    schema = full.parameter_openapi_schema or {}
    types = {name: (field["type"], "description" in field) for name, field in schema["properties"].items()}
    assert types == {"recipe": ("string", True), "overrides": ("array", True)}
    assert (alone.parameter_openapi_schema or {})["required"] == ["node"]
    assert str(ROOT) not in (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")


@pytest.fixture
def terminal(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe `smallest`, in which `alignment` is called, without a stack."""
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(workplace.folder / "no stack"))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(workplace.folder)
    Path("smallest.yaml").write_text(SMALLEST.replace("WORD", f'"{workplace.token}"'), encoding="utf-8")
    return workplace.folder


def run_in_process_of_its_own() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli.main", "run", "smallest.yaml"]
    return subprocess.run(command, env=service_environment(), capture_output=True, text=True, check=False)


def alignment(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.slow("runs a recipe by a worker of Prefect")
def test_a_run_from_the_terminal(terminal: Path, worker: Path) -> None:
    first = run_in_process_of_its_own()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "smallest: 2 to compute, 0 to reuse" in first.stdout
    assert "base                " in first.stdout
    (report,) = (terminal / "outputs").glob("*/report.html")
    page = report.read_text(encoding="utf-8")
    assert page.lstrip().startswith("<!")
    assert str(report.relative_to(terminal)) in first.stdout

    run = newest_run()
    assert (run.name, run.tags) == ("smallest, seed 0", ["alignment", "smallest"])
    (text,) = [str(artifact.data) for artifact in artifacts(run, "markdown") if artifact.key == "report"]
    assert f"`alignment report {run.id}`" in text
    (link,) = re.findall(r"\[Open the report with curves and samples\]\((http\S+)\)", text)
    opened = httpx.get(link)
    assert (opened.text, opened.headers["content-type"]) == (page, "text/html; charset=utf-8")
    report.unlink()
    shown = alignment("report", str(run.id))
    assert (shown.stdout, report.is_file()) == (f"{report.relative_to(terminal)}\n", True)
    unknown = alignment("report", "unknown")
    assert "has no report of the run unknown" in unknown.stderr

    second = alignment("run", "smallest.yaml")
    assert second.exit_code == 0, second.output
    assert "smallest: 0 to compute, 2 to reuse" in second.stdout
    assert "Nothing had to be computed: every stage was in the store." in second.stdout

    listed = alignment("artifacts", "--stage", "base").stdout
    name = next(word for word in listed.split() if word.startswith("base/"))
    assert f'"key": "{name.removeprefix("base/")}' in alignment("show", name).stdout
    pulled = alignment("pull", name, "pulled")
    assert pulled.exit_code == 0, pulled.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in Path("pulled").iterdir()}
    again = alignment("pull", name, "pulled")
    assert (again.exit_code, again.stderr) == (1, "error: pulled exists already: give another folder\n")
    report_name = next(w for w in alignment("artifacts").stdout.split() if w.startswith("report/"))
    assert f"node.base: base {name}" in alignment("lineage", report_name).stdout


def test_mistakes_end_with_one_sentence(terminal: Path) -> None:
    for command in ("plan", "run"):
        wrong = alignment(command, "smallest.yaml", "base.dtpe=float32")
        assert (wrong.exit_code, wrong.stderr) == (
            1, "error: override `base.dtpe=float32`: unknown key `base.dtpe`, did you mean `dtype`?\n",
        )  # fmt: skip


def test_what_a_run_waits_for_is_said(workplace: Workplace, client: SyncPrefectClient, worker: Path) -> None:
    client.create_work_pool(WorkPoolCreate(name="nobody", type="process"))
    deployment = few.to_deployment("lonely", work_pool_name="nobody", entrypoint_type=EntrypointType.MODULE_PATH)
    deployment.apply()  # type: ignore[union-attr]
    parameters = {"recipe": workplace.recipe, "nodes": NODES}
    flow_run: Any = run_deployment("few/lonely", parameters=parameters, timeout=0, as_subflow=False)

    def said(seconds: float) -> str:
        return awaited(client, client.read_flow_run(flow_run.id), datetime.now(UTC) + timedelta(seconds=seconds))

    assert said(0) == ""
    assert said(30).startswith("no worker polls the work pool `nobody`: see `alignment status`")
    client.set_flow_run_state(flow_run.id, Pending())
    assert said(0) == ""
    assert said(30).startswith("a worker has taken the run, whose process does not start")
    client.set_flow_run_state(flow_run.id, Running())
    emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"})
    wait_until(lambda: said(120).startswith("no heartbeat of the run's process since "))
    assert said(10) == ""
    client.set_flow_run_state(flow_run.id, Cancelling())
    assert said(120) == ""
