"""The deployments, run by a real worker of the pool: from a terminal, and as the UI's buttons do."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import Result
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.deployments.runner import EntrypointType
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Pending, Running
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.waiting import awaited
from deployments.stack.automations import HEARTBEAT_SECONDS
from deployments.stack.registration import register_deployments
from flows.never_started import TAG
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.pipeline.record import read_record
from tests.cluster import ROOT, Service, service_environment
from tests.flows.conftest import NODES, Workplace
from tests.flows.few import few
from tests.flows.test_running import artifacts, newest_run, wait_until
from tests.services import S3Server, s3_prefix

pytestmark = pytest.mark.system

POOL = "alignment"
UNEXPECTED = (StateType.CRASHED, StateType.COMPLETED)
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
    """A worker of the pool for the shipped deployments and for `few`, deployed as `few/test`; its folder."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "logs").mkdir()
    environment = service_environment(
        ALIGNMENT_STORE=store_url, RAY_API_SERVER_ADDRESS=ray_address, PREFECT_API_URL=prefect_api,
        PREFECT_HOME=str(folder), PREFECT_WORKER_QUERY_SECONDS="1",
    )  # fmt: skip
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        assert register_deployments(folder, environment)
        deploy("test", POOL)
    service = Service([sys.executable, "-m", "flows.worker", "--pool", POOL], folder / "log", environment)
    yield folder
    service.end()


def deploy(name: str, pool: str) -> None:
    """`few`, as the shipped flows are deployed."""
    command = {"command": "python -m flows.process"}
    kind = EntrypointType.MODULE_PATH
    few.to_deployment(name, work_pool_name=pool, job_variables=command, entrypoint_type=kind).apply()  # type: ignore[union-attr]


@pytest.fixture
def client(workplace: Workplace) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def start(workplace: Workplace, *more: str) -> FlowRun:
    parameters = {"recipe": workplace.recipe, "nodes": [*NODES, *more]}
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


@pytest.mark.endurance("chaos")
@pytest.mark.slow("runs a recipe by a worker of Prefect")
def test_a_retry_at_once_repeats_the_stage_that_failed_or_was_cancelled_and_nothing_else(
    workplace: Workplace, client: SyncPrefectClient, worker: Path
) -> None:
    """At once, while the process of the failed attempt still ends: the worker knows both by the run's id alone."""
    started = workplace.folder / "started"
    workplace.write_recipe(f"needs: '{{sign}}', waits_for: '{started}'")
    flow_run = start(workplace)
    failed = wait_for(client, flow_run, StateType.FAILED, *UNEXPECTED)
    assert failed.run_count == 1
    message = (failed.state.message if failed.state else None) or ""
    assert "data.words: " in message
    assert "ValueError: there is no sign" in message
    assert "full log: `ray job logs dataset-" in message
    assert workplace.manifest("data.words") is None
    workplace.sign.touch()
    retry(client, failed)
    wait_for(client, failed, StateType.RUNNING, *UNEXPECTED)

    wait_until(lambda: list(workplace.attempts("data.words").values())[-1:] == ["RUNNING"])
    client.set_flow_run_state(flow_run.id, Cancelling())
    cancelled = wait_for(client, flow_run, StateType.CANCELLED, *UNEXPECTED)
    assert cancelled.state_name == "Cancelled"
    assert list(workplace.attempts("data.words").values()) == ["FAILED", "STOPPED"]
    record = read_record(workplace.repository.store, str(flow_run.id))
    assert record is not None
    assert record.stopped
    assert [(node.name, node.outcome, len(node.attempts)) for node in record.nodes if node.name == "data.words"] == [
        ("data.words", "failed", 2)
    ]
    retry(client, cancelled)
    started.touch()
    wait_for(client, cancelled, StateType.RUNNING)
    done = wait_for(client, cancelled, StateType.COMPLETED, StateType.FAILED, *UNEXPECTED)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    assert (done.id, done.run_count) == (flow_run.id, 3)
    assert {name: list(workplace.attempts(name).values()) for name in NODES} == {
        "data.test": ["SUCCEEDED"],
        "data.words": ["FAILED", "STOPPED", "SUCCEEDED"],
        "base": ["SUCCEEDED"],
    }
    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[done.id])))
    states = sorted((run.name, run.state_name or "") for run in runs if run.name != "data.words")
    assert states == [("base", "Computed"), *2 * [("base", "Reused")],
                      ("data.test", "Computed"), *2 * [("data.test", "Reused")]]  # fmt: skip


@pytest.mark.slow("a run whose flow and rank are killed")
def test_a_run_whose_flow_and_rank_are_killed_ends_as_if_they_had_not_been(
    workplace: Workplace, client: SyncPrefectClient, worker: Path, warm_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each a retry at once: it attaches to the job of the killed flow, and resumes where the killed rank was.

    tests/chaos kills every part of a run.
    """
    workplace.write_recipe("size: 300")
    flow_run, node = start(workplace, "pretrain"), workplace.node("pretrain")
    step = wait_for_checkpoint(workplace)
    (rank,) = held = processes(
        lambda process: (
            "ray::_Rank" in " ".join(process.cmdline())
            and any(str(warm_socket) in parent.cmdline() for parent in process.parents())
        )
    )
    rank.suspend()
    for process in processes(lambda process: process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)):
        process.kill()
    crashed = wait_for(client, flow_run, StateType.CRASHED, every_seconds=0.01)
    retry(client, crashed)
    wait_for(client, crashed, StateType.RUNNING)
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id]))
    attached = f"attached to the running job {next(iter(workplace.attempts('pretrain')))}"
    wait_until(lambda: any(attached in log.message for log in client.read_logs(of_run)))
    rank.kill()
    failed = wait_for(client, flow_run, StateType.FAILED, *UNEXPECTED)
    assert "rank 0 died" in ((failed.state.message if failed.state else None) or "")
    retry(client, failed)
    wait_for(client, failed, StateType.RUNNING)
    done = wait_for(client, failed, StateType.COMPLETED, StateType.FAILED, *UNEXPECTED)
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    assert [list(workplace.attempts(name).values()) for name in NODES] == 3 * [["SUCCEEDED"]]
    attempts = workplace.attempts("pretrain")
    assert list(attempts.values()) == ["FAILED", "SUCCEEDED"]
    log = workplace.jobs._client.get_job_logs([*attempts][-1])
    assert int(re.search(r"resumes after step (\d+)", log)[1]) >= step  # type: ignore[index]
    for name in ("ALIGNMENT_CACHE", "ALIGNMENT_WORKDIR"):
        monkeypatch.setenv(name, str(workplace.folder / name))
    undisturbed = prepare(workplace.recipe, [], store=str(workplace.folder / "undisturbed"))
    assert undisturbed.node("pretrain").ref == node.ref
    expected, found = (
        {file.path: file.sha256 for file in manifest.files if file.path.endswith(".safetensors")}
        for manifest in (
            try_node(undisturbed, undisturbed.node("pretrain"), print).manifest,
            workplace.manifest("pretrain"),
        )
        if manifest is not None
    )
    assert expected == found != {}
    assert psutil.wait_procs(held, timeout=20)[1] == []


def processes(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if wanted(process):
                found.append(process)
    return found


def wait_for_checkpoint(workplace: Workplace) -> int:
    """The step of the newest checkpoint of `pretrain`."""
    checkpoints = Checkpoints(workplace.repository.store, workplace.node("pretrain").ref)
    deadline = time.monotonic() + 300
    while (step := checkpoints.newest_step()) is None:
        assert time.monotonic() < deadline, workplace.attempts("pretrain")
        time.sleep(0.02)
    return step


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
    properties = (full.parameter_openapi_schema or {})["properties"]
    assert {name: field["title"] for name, field in properties.items()} == {
        "recipe": "Recipe",
        "overrides": "Overrides",
        "rerun_from": "Rerun from",
        "budget": "Budget",
        "tags": "Tags",
    }
    assert "tiny" in properties["recipe"]["anyOf"][0]["enum"]
    assert (alone.parameter_openapi_schema or {})["required"] == ["node"]
    assert str(ROOT) not in (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")


@pytest.mark.endurance("chaos")
@pytest.mark.slow("registers the deployments again")
def test_what_was_deleted_is_registered_again_and_an_enabled_schedule_stays_as_it_was_set(
    terminal: Path, worker: Path, prefect_api: str
) -> None:
    environment = service_environment(PREFECT_HOME=str(worker))
    with httpx.Client(base_url=prefect_api) as server:

        def deployment(name: str) -> dict[str, Any]:
            found: dict[str, Any] = server.get(f"/deployments/name/{name}").raise_for_status().json()
            return found

        scheduled = deployment("iterative-dpo/scheduled")
        (shipped,) = scheduled["schedules"]
        assert (shipped["slug"], shipped["active"]) == ("tiny-loop", False)
        set_by_hand = {"active": True, "parameters": {"recipe": "mine"}, "schedule": {"interval": 1e6}}
        path = f"/deployments/{scheduled['id']}/schedules/{shipped['id']}"
        server.patch(path, json=set_by_hand).raise_for_status()
        server.delete(f"/deployments/{deployment('iterative-dpo/rounds')['id']}").raise_for_status()
        assert register_deployments(worker, environment)
        assert deployment("iterative-dpo/rounds")["schedules"] == []
        (kept,) = deployment("iterative-dpo/scheduled")["schedules"]
        assert (kept["active"], kept["parameters"]) == (True, {"recipe": "mine"})
        assert kept["schedule"]["interval"] == 1e6
        assert not register_deployments(worker, environment)
        server.patch(path, json={"active": False}).raise_for_status()
        made = {"slug": "lost", "active": True, "schedule": {"interval": 1e6}}
        server.post(f"/deployments/{scheduled['id']}/schedules", json=[made]).raise_for_status()
        assert alignment("schedule", "lost", "--off").exit_code == 0  # a loop whose recipe is gone
        assert [left["slug"] for left in deployment("iterative-dpo/scheduled")["schedules"]] == ["tiny-loop"]
        assert alignment("schedule", "lost", "--off").stderr.startswith("error: unknown recipe `lost`")


@pytest.fixture
def terminal(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe `smallest`, in which `alignment` is called, without a stack."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(workplace.folder)
    Path("smallest.yaml").write_text(SMALLEST.replace("WORD", f'"{workplace.token}"'), encoding="utf-8")
    return workplace.folder


def run_in_process_of_its_own() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli.main", "run", "smallest.yaml"]
    return subprocess.run(command, env=service_environment(), capture_output=True, text=True, check=False)


def alignment(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.endurance("chaos")
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
    assert "has no run `unknown`: its newest are " in unknown.stderr

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
            1, "error: override `base.dtpe=float32`: unknown key `base.dtpe` (did you mean `dtype`?)\n",
        )  # fmt: skip


@pytest.mark.endurance("chaos")
def test_what_a_run_waits_for_is_said(workplace: Workplace, client: SyncPrefectClient, worker: Path) -> None:
    client.create_work_pool(WorkPoolCreate(name="nobody", type="process"))
    deploy("lonely", "nobody")
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
