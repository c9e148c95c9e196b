"""RL on two nodes that share no file system; skipped, with the reason, where a machine cannot be two."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.tasks.stopped_jobs import STEPS
from tests.two_nodes.__main__ import SCENARIO
from tests.two_nodes.machines import in_a_rack, obstacle

_OBSTACLE = obstacle()
pytestmark = [
    pytest.mark.endurance("two-nodes"),
    pytest.mark.slow("starts Ray on two nodes"),
    pytest.mark.skipif(bool(_OBSTACLE), reason=f"this machine cannot be two nodes: {_OBSTACLE}"),
]

RACK = "from tests.two_nodes.machines import in_a_rack; in_a_rack('tests.two_nodes.meeting')"


def test_ranks_on_two_machines_meet() -> None:
    # The machine's name stands for loopback on both: what gloo would use by itself leads nowhere.
    assert in_a_rack("tests.two_nodes.meeting") == [["21", "cable"], ["21", "cable"]]


def test_a_rack_that_is_killed_leaves_nothing() -> None:
    before = psutil.net_if_addrs().keys()
    rack = subprocess.Popen([sys.executable, "-c", RACK])
    deadline = time.monotonic() + 60
    while sum(map(_is_machine, processes := psutil.Process(rack.pid).children(recursive=True))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rack.kill()
    rack.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert psutil.net_if_addrs().keys() == before


def _is_machine(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline() == ["sleep", "600"]
    return False


@pytest.mark.timeout(900)  # three starts of a rank
def test_a_job_whose_node_is_drained_resumes_on_the_other() -> None:
    found = in_a_rack("tests.two_nodes.drained")
    assert [status for status, _ in found["hooks"]] == [0], found["hooks"]  # it returned once the job had left
    (again,) = [line for line in found["said"] if line.endswith("submitting it again")]
    assert again.startswith("PreemptedError: a node of the job is taken away; it resumes after step ")
    step = int(again.partition("after step ")[2].partition(",")[0])
    assert 20 <= step < STEPS
    assert f"resumes after step {step}" in found["said"]
    assert found["weights"][0] == found["weights"][1]
    assert found["metrics"][0] == found["metrics"][1]


@pytest.mark.timeout(1800)  # three starts of two engines and two ranks
def test_rl_on_two_nodes_is_killed_and_resumed() -> None:
    found = in_a_rack(SCENARIO)
    assert found["engines"] == {"head": 1, "other": 1}
    assert re.search(r"\brank [01] (?:died in|failed)", found["reason"])
    assert f"resumes after step {found['checkpoint']}" in found["phases"]
    assert 1 <= found["checkpoint"] < 5
    # Rank 0's node is not the driver's: what it saved has come to the driver.
    assert any(line.startswith("rank 0 is on another node") for line in found["lines"])
    assert found["weights"][0] == found["weights"][1]
    assert found["metrics"][0] == found["metrics"][1]
    assert [line["step"] for line in found["metrics"][0]] == [0, 1, 2, 3, 4]
    assert found["checkpoints_left"] is None
