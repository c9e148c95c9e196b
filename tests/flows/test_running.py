"""The flow on a real Ray head and a real Prefect server, in a local store; the other files have S3."""

import io
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import Artifact, FlowRun
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.following import _FollowedRun
from deployments.cli.live_view import view
from deployments.cli.main import app
from flows.earlier_attempts import close_earlier_attempts
from rlhf_core.errors import RecipeError, StageError, StoreError
from rlhf_core.pipeline.record import read_record, read_start
from tasks.followers import Follower
from tasks.job_request import id_prefix
from tasks.run_progress import StageProgress, stages_of
from tests.flows.conftest import NODES, Workplace
from tests.flows.few import few

pytestmark = [pytest.mark.system, pytest.mark.parametrize("store_url", ["local"], indirect=True)]


def wait_until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.3)


def newest_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        return max(client.read_flow_runs(), key=lambda run: run.created.timestamp() if run.created else 0.0)


def artifacts(flow_run: FlowRun, kind: str) -> list[Artifact]:
    of_run = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]), type=ArtifactFilterType(any_=[kind])
    )
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=of_run)


def outcomes(rows: list[dict[str, str]]) -> dict[str, str]:
    return {row["stage"]: row["outcome"] for row in rows}


@pytest.mark.slow("runs a recipe as Ray jobs")
def test_a_second_run_reuses_everything_and_a_deleted_manifest_is_a_miss(workplace: Workplace) -> None:
    assert outcomes(few(workplace.recipe, NODES, tags=["mine"])) == dict.fromkeys(NODES, "computed")
    assert newest_run().tags == ["few", "mine"]
    (progress,) = artifacts(newest_run(), "progress")
    assert progress.data == 100.0
    assert stages_of(progress.description or "") == dict.fromkeys(NODES, StageProgress(100.0, "done"))
    with get_client(sync_client=True) as client, view(Console(file=io.StringIO())) as terminal:
        shown = _FollowedRun(client, newest_run().id, NODES, terminal)._snapshot()
    assert [(each.name, each.state, each.percent, each.text) for each in shown] == [
        (name, "Computed", 100.0, "done") for name in NODES
    ]
    first, started = (read(workplace.repository.store, str(newest_run().id)) for read in (read_record, read_start))
    assert [first and first.tags, started and started.tags] == [("mine",), ("mine",)]
    assert outcomes(few(workplace.recipe, NODES)) == dict.fromkeys(NODES, "reused")
    record = read_record(workplace.repository.store, str(newest_run().id))
    assert record is not None
    assert (record.succeeded, record.tags) == (True, ())
    assert [(node.name, node.outcome, node.metrics.get("rows")) for node in record.nodes] == [
        ("base", "reused", None), ("data.test", "reused", 4), ("data.words", "reused", 4),
    ]  # fmt: skip

    run = newest_run()
    assert run.name == "few/base+data.test+data.words, seed 0"
    assert run.tags == ["few"]

    workplace.repository.store.delete(f"{workplace.node('data.words').ref.path}/manifest.json")
    expected = {"base": "reused", "data.test": "reused", "data.words": "computed"}
    assert outcomes(few(workplace.recipe, NODES)) == expected
    assert list(workplace.attempts("data.words").values()) == ["SUCCEEDED", "SUCCEEDED"]


def _run_killed_without_mercy(workplace: Workplace) -> None:
    """Its job continues until the sign is there."""
    workplace.write_recipe("waits_for: '{sign}'")
    flow = workplace.start_flow("data.test", "data.words")
    try:
        wait_until(lambda: list(workplace.attempts("data.words").values()) == ["RUNNING"])
    finally:
        flow.kill()
        flow.wait()


@pytest.mark.endurance("chaos")
@pytest.mark.slow("runs a recipe as Ray jobs")
def test_a_run_whose_terminal_is_gone_leaves_its_job_to_the_next(workplace: Workplace) -> None:
    """As when the worker dies that reads what the run prints: the next line hits a broken pipe."""
    workplace.write_recipe("waits_for: '{sign}'")
    reading, writing = os.pipe()
    flow = workplace.start_flow("data.test", "data.words", output=writing)
    os.close(writing)
    again = None
    try:
        with os.fdopen(reading) as output:
            assert any("waiting" in line for line in output)
        time.sleep(3)  # its job prints five lines a second
        assert list(workplace.attempts("data.words").values()) == ["RUNNING"]
        again = workplace.start_flow("data.test", "data.words")
        wait_until(lambda: "attached to the running job" in (workplace.folder / "flow.log").read_text())
        workplace.sign.touch()
        assert again.wait(90) == 0
    finally:
        for process in filter(None, (flow, again)):
            process.kill()
            process.wait()
    assert list(workplace.attempts("data.words").values()) == ["SUCCEEDED"]


@pytest.mark.endurance("chaos")
@pytest.mark.slow("runs a recipe as Ray jobs")
def test_of_two_runs_that_follow_a_job_only_the_last_one_stops_it(workplace: Workplace) -> None:
    workplace.write_recipe("waits_for: '{sign}'")
    first = workplace.start_flow("data.test", "data.words")
    second = None
    try:
        wait_until(lambda: list(workplace.attempts("data.words").values()) == ["RUNNING"])
        second = workplace.start_flow("data.test", "data.words")
        wait_until(lambda: "attached to the running job" in (workplace.folder / "flow.log").read_text())
        first.send_signal(signal.SIGINT)
        assert first.wait(60) != 0
        assert list(workplace.attempts("data.words").values()) == ["RUNNING"]
        second.send_signal(signal.SIGINT)
        assert second.wait(60) != 0
        assert list(workplace.attempts("data.words").values()) == ["STOPPED"]
        assert workplace.manifest("data.words") is None
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()


@pytest.mark.endurance("chaos")
@pytest.mark.slow("runs a recipe as Ray jobs")
def test_a_run_that_comes_while_the_last_one_is_cancelled_submits_another_job(workplace: Workplace) -> None:
    """The cancelled run has died before it could stop the job that nobody follows any more."""
    _run_killed_without_mercy(workplace)
    (job_id,) = workplace.attempts("data.words")
    assert Follower(workplace.repository.store, id_prefix(job_id), str(newest_run().id)).leave_and_stop(job_id)
    with ThreadPoolExecutor(1) as other:
        # The first job would end by itself at the sign, which is for the second.
        stopped = other.submit(wait_until, lambda: workplace.attempts("data.words").get(job_id) != "RUNNING")
        stopped.add_done_callback(lambda _: workplace.sign.touch())
        assert outcomes(few(workplace.recipe, ["data.test", "data.words"]))["data.words"] == "computed"
        stopped.result()
    assert list(workplace.attempts("data.words").values()) in (["STOPPED", "SUCCEEDED"], ["SUCCEEDED"])


def test_a_stage_whose_inputs_nobody_made_is_refused(workplace: Workplace) -> None:
    with pytest.raises(RecipeError, match=r"^data.words needs data.test, which is not in the store"):
        few(workplace.recipe, ["data.words"])
    with pytest.raises(RecipeError, match=r"^the recipe few has no node `sft`; it has base, data.test, data.words"):
        few(workplace.recipe, ["sft"])
    assert workplace.attempts("data.words") == {}


def test_what_is_wrong_is_said_before_any_job(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace.folder / "rows.py").unlink()
    with pytest.raises(RecipeError, match=r"rows\.py: there is no such file"):
        few(workplace.recipe, NODES)
    with pytest.raises(RecipeError, match="unknown recipe `fww`"):
        few("fww", NODES)
    monkeypatch.delenv("ALIGNMENT_STORE")
    with pytest.raises(
        StoreError, match=r"^no artifact store is configured: run `alignment up`, or set ALIGNMENT_STORE"
    ):
        few("tiny", NODES)


@pytest.mark.slow("runs a recipe as Ray jobs")
def test_a_failed_stage_says_why_on_its_run_s_page_and_the_next_attempt_closes_what_waited(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its job printed is in the store."""
    workplace.write_recipe("needs: '{sign}'")
    with pytest.raises(StageError, match="there is no sign"):
        few(workplace.recipe, [*NODES, "pretrain"])
    run = newest_run()
    (progress,) = artifacts(run, "progress")
    first, *others = (progress.description or "").split("\n\n")
    assert re.match(
        r"\*\*data.words\*\* \S+ % · failed: StageError: rows.py:rows raised ValueError: there is no", first
    )
    assert sorted(others) == ["**base** 100 % · done", "**data.test** 100 % · done"]
    wait_until(lambda: task_states(run).get("pretrain") == "NotReady")
    before = task_states(run)
    close_earlier_attempts(run.id)
    assert task_states(run) == {**before, "pretrain": "NotRun"}

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # its cluster is gone, and Ray's logs with it
    for of in (str(run.id), workplace.node("data.words").ref.full):
        printed = CliRunner().invoke(app, ["logs", of])
        assert printed.exit_code == 0, printed.output
        assert "ValueError: there is no sign" in printed.stdout


def test_a_library_s_error_is_on_the_run_s_page_too(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ConnectionResetError("the peer has gone")

    monkeypatch.setattr("tasks.prefect_tasks.run_stage", broken)
    with pytest.raises(Exception, match="the peer has gone"):
        few(workplace.recipe, NODES)
    (progress,) = artifacts(newest_run(), "progress")
    assert "**data.test** 0 % · failed: ConnectionResetError: the peer has gone" in (progress.description or "")


def task_states(flow_run: FlowRun) -> dict[str, str | None]:
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    with get_client(sync_client=True) as client:
        return {run.name: run.state_name for run in client.read_task_runs(flow_run_filter=of_run)}
