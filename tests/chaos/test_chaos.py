"""Every part of a run is killed once while `tiny` runs; it ends with the weights of a run without kills.

A loop on a schedule loses no round and uses no prompt twice. `make chaos` has twenty rounds, each killed once;
`make chaos CHAOS_ROUNDS=50` has more, at most 58. `CHAOS_WHOLE=1 pytest tests/chaos -k parts` computes all of `tiny`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

from tests.chaos.kills import KILL_ENGINE, KILLS
from tests.chaos.loop_scenario import loop_on_a_schedule
from tests.chaos.recipe import CHECKPOINT_STEPS
from tests.chaos.scenario import (
    RANK,
    ROOT,
    Place,
    Run,
    jobs,
    kill,
    leftovers,
    manifests,
    processes,
    processes_left,
    service,
    started_stack,
    undisturbed,
    until,
    weights,
)

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", 1))

pytestmark = pytest.mark.timeout(3000 + 120 * ROUNDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch, started_stack(folder, patch) as place:
        yield place
    assert processes_left(place) == set()


@pytest.fixture
def client(place: Place) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def test_a_run_whose_parts_are_killed_ends_as_if_they_had_not_been(place: Place, client: SyncPrefectClient) -> None:
    run = Run(place, client)
    run.hold("sft", 1)
    before = {name: manifest.finished_at for name, manifest in manifests(run.store, place).items()}
    assert before.keys() >= {"base", *run.inputs("sft")}
    for number, (name, kill_it) in enumerate(KILLS.items()):
        print(f"killing: {name}", flush=True)
        step = run.hold("sft", CHECKPOINT_STEPS)
        if number == 0:
            with undisturbed(place) as store:  # the cores are idle while the run counts as running
                kill_it(run, "sft", step)
        else:
            kill_it(run, "sft", step)
    run.let_go()
    print("killing: engine", flush=True)
    KILL_ENGINE(run, "rl", run.hold("rl", 1))
    state = run.wait_for_its_end()
    assert state.name == "Completed", state
    found = manifests(run.store, place)
    assert weights(found) == weights(manifests(store, place))
    assert [name.partition("/")[0] for name in sorted(weights(found))] == ["base", "pretrain", "rl", "sft"]
    assert {name: found[name].finished_at for name in before} == before  # nothing is computed twice
    until(lambda: not leftovers(place), lambda: f"the end of {leftovers(place)}", 60)


def test_ctrl_c_stops_the_jobs_of_a_run_whose_worker_and_flow_have_died(
    place: Place, client: SyncPrefectClient
) -> None:
    command = [sys.executable, "-m", "deployments.cli.main", "run", place.recipe, "sft.max_steps=1001"]
    with (place.folder / "command.log").open("wb") as log:
        shown = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        (rank,) = until(lambda: processes(place, RANK), "a job with a rank")
        rank.suspend()
        (job_id,) = jobs().running()
        kill([service("worker"), *processes(place, "flows.process")])
        shown.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert shown.wait(120) == 1
        print(f"Ctrl-C took {time.monotonic() - started:.0f} s", flush=True)
    finally:
        shown.kill()
        shown.wait()
    output = (place.folder / "command.log").read_text()
    assert "no process of the run answers: stopping its jobs from here" in output
    assert str(jobs()._details(job_id).status) == "STOPPED"
    newest = max(client.read_flow_runs(), key=lambda run: run.created.timestamp() if run.created else 0.0)
    assert newest.state_name == "Cancelled"
    assert [run.name for run in client.read_flow_runs() if run.state and not run.state.is_final()] == []
    until(lambda: not leftovers(place), lambda: f"the end of {leftovers(place)}", 60)


def test_a_loop_on_a_schedule_loses_no_round_and_uses_no_prompt_twice(
    place: Place, client: SyncPrefectClient, tmp_path: Path
) -> None:
    loop_on_a_schedule(place, client, tmp_path, ROUNDS)
