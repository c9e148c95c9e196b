"""What a placement asks for, and how a process finds its cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlhf_core.actors.placement import worker_bundles, worker_threads
from rlhf_core.config.training import Placement


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
    assert worker_threads(Placement(cpus_per_worker=cpus, threads=threads)) == expected


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


def test_the_job_s_cluster_is_joined_and_without_one_a_cluster_starts(ray_cluster: None) -> None:
    import ray

    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": os.getcwd()}
    running = ray.get_runtime_context().gcs_address
    assert connected(own | {"RAY_ADDRESS": running})[0] == running
    assert connected(own)[0] != running
