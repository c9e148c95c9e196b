"""What a placement asks for, and how a process finds its cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import ray

from rlhf_core.actors.placement import require_possible, reserve, shared_bundles, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import StageError
from rlhf_core.tracking.protocol import Progress, parse

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("spread", "bundle"), [(1, {"CPU": 3.5, "GPU": 1.0}), (2, {"CPU": 5.0, "GPU": 2.0})])
def test_an_engine_and_the_workers_on_its_gpus_share_a_bundle(spread: int, bundle: dict[str, float]) -> None:
    placement = Placement(workers=4, cpus_per_worker=1.5, gpus_per_worker=1.0)
    rollout = VllmEngineConfig(
        max_length=8, engines=4 // spread, tensor_parallel_size=spread, cpus_per_engine=2.0, gpus_per_engine=spread
    )
    assert shared_bundles(placement, rollout) == [bundle] * (4 // spread)


@pytest.mark.parametrize(
    ("placement", "bundles"),
    [
        (Placement(workers=2, cpus_per_worker=1.5), [{"CPU": 1.5}, {"CPU": 1.5}]),
        (Placement(workers=1, cpus_per_worker=4.0, gpus_per_worker=1.0), [{"CPU": 4.0, "GPU": 1.0}]),
    ],
)
def test_one_bundle_a_worker(placement: Placement, bundles: list[dict[str, float]]) -> None:
    assert worker_bundles(placement) == bundles


@pytest.mark.parametrize(("cpus", "threads", "expected"), [(0.5, 0, 1), (1.5, 0, 2), (4.0, 0, 4), (4.0, 3, 3)])
def test_as_many_threads_as_reserved_cpus_unless_told(cpus: float, threads: int, expected: int) -> None:
    assert Placement(cpus_per_worker=cpus, threads=threads).num_threads == expected


CONNECT = """
import ray
from rlhf_core.actors.placement import connect
connect(); connect()
print(ray.get_runtime_context().gcs_address)
"""


def connected(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("starts a Ray cluster")
def test_the_job_s_cluster_is_joined_and_without_one_a_cluster_starts(ray_cluster: None) -> None:
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": os.getcwd()}
    running = ray.get_runtime_context().gcs_address
    assert connected(own | {"RAY_ADDRESS": running})[0] == running
    assert connected(own)[0] != running


def test_more_than_the_cluster_has_is_refused_at_once(ray_cluster: None) -> None:
    with pytest.raises(StageError, match=r"^asked Ray for 18 CPUs, the whole cluster has 4 CPUs; ask for less of it$"):
        RayWorkerGroup(Placement(workers=2, cpus_per_worker=9.0), dict)
    with (
        pytest.raises(StageError, match=r"^asked Ray for 1 CPUs and 2 GPUs, the whole cluster has 4 CPUs and 0 GPUs;"),
        reserve([{"CPU": 0.5, "GPU": 1.0}] * 2),
    ):
        pass


def test_parts_that_fit_on_no_node_are_refused_at_once() -> None:
    nodes = [{"CPU": 2.0, "memory": 9.0}, {"CPU": 1.0}]
    with pytest.raises(
        StageError, match=r"^asked Ray for 2 times 1\.5 CPUs, .* have room for 1 \(2 CPUs; 1 CPUs\); ask for less"
    ):
        require_possible([{"CPU": 1.5}, {"CPU": 1.5}], nodes)
    require_possible([{"CPU": 0.1}] * 30, nodes)


def test_a_busy_cluster_is_waited_for_and_the_progress_says_so(
    ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    held, given_back = threading.Event(), threading.Event()

    def hold() -> None:
        with reserve([{"CPU": 2.0}]):
            held.set()
            given_back.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    threading.Timer(2.0, given_back.set).start()
    with reserve([{"CPU": 1.0}, {"CPU": 2.0}], every=0.5):
        assert given_back.is_set()
    holder.join()
    phases = told(capsys)
    assert phases[0] == "waiting for Ray: asked for 3 CPUs, free are 2 CPUs of 4 CPUs"
    assert phases[-1] == "Ray has reserved 3 CPUs"


def test_a_cluster_that_grows_is_waited_for_until_somebody_stops_the_job(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALIGNMENT_AUTOSCALING", "1")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.alarm(2)
        with pytest.raises(KeyboardInterrupt), reserve([{"CPU": 9.0}], every=0.5):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert told(capsys)[0] == "waiting for Ray: asked for 9 CPUs, free are 4 CPUs of 4 CPUs"
    with reserve([{"CPU": 4.0}]):  # nothing is left behind
        pass


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The phases of the progress lines."""
    messages = [parse(line) for line in capsys.readouterr().out.splitlines()]
    return [message.phase for message in messages if isinstance(message, Progress)]
