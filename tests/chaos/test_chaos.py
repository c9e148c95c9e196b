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
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.chaos.killed_run import require_undisturbed_end
from tests.chaos.kills import KILLS, kill_engine
from tests.chaos.loop_scenario import loop_on_a_schedule
from tests.chaos.scenario import RANK, ROOT, Place, jobs, kill, leftovers, processes, service, until

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", 1))

pytestmark = [
    pytest.mark.endurance("chaos"),
    pytest.mark.slow("each part of a run is killed, and the run continues"),
    pytest.mark.timeout(3000 + 120 * ROUNDS),
]


def test_a_run_whose_parts_are_killed_ends_as_if_they_had_not_been(place: Place, client: SyncPrefectClient) -> None:
    require_undisturbed_end(place, client, KILLS, kill_engine)


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
        assert shown.wait(120) == 130
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


@pytest.mark.endurance("mutations")  # CI runs one part, so that none may be long
def test_a_loop_on_a_schedule_loses_no_round_and_uses_no_prompt_twice(
    place: Place, client: SyncPrefectClient, tmp_path: Path
) -> None:
    loop_on_a_schedule(place, client, tmp_path, ROUNDS)
