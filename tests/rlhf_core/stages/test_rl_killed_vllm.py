"""GRPO as a job, with two vLLM engines and two DeepSpeed ranks: killed in the middle of a step, and submitted again.

Here at ZeRO 3; tests/two_nodes does the same at ZeRO 2.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import ray

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.contract import Input
from rlhf_core.stages.runner import run_job
from tests.rlhf_core.stages.killed_runs import finish, kill_when_held, start
from tests.rlhf_core.stages.rl_jobs import job_inputs, results, specified, two_by_two


def job(store_url: str, spec: StageSpec, folder: Path, environment: dict[str, str]) -> None:
    """The job of the spec, its output in a file, as on a cluster."""
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
    os.environ.update(environment)
    run_job(store_url, spec.ref)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    return job_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.timeout(1200)  # three starts of engines and ranks, two of them side by side
def test_a_killed_job_ends_as_if_it_had_not_been(ray_cluster: None, inputs: dict[str, Input], tmp_path: Path) -> None:
    config = two_by_two(zero_stage=3)
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "ALIGNMENT_CACHE": str(tmp_path / "cache")}
    whole, killed = (ArtifactRepository(open_store(str(tmp_path / name / "store"))) for name in ("whole", "killed"))
    spec = specified(whole, inputs, tmp_path / "whole", config)
    assert specified(killed, inputs, tmp_path / "killed", config) == spec
    undisturbed = start(job, whole.store.url, spec, tmp_path / "whole", environment)
    first = start(job, killed.store.url, spec, tmp_path / "killed", environment | {"HOLD": str(tmp_path / "killed")})
    checkpoints = Checkpoints(killed.store, spec.ref)
    while (checkpoints.newest_step() or 0) < 2:
        assert first.is_alive(), (tmp_path / "killed" / "log").read_text()
        time.sleep(0.05)
    (tmp_path / "killed" / "now").touch()
    kill_when_held(first, tmp_path / "killed")
    step = checkpoints.newest_step()
    finish(start(job, killed.store.url, spec, tmp_path / "killed", environment))
    finish(undisturbed)
    assert f'"phase": "resumes after step {step}"' in (tmp_path / "killed" / "log").read_text()
    assert checkpoints.newest_step() is None  # they go when the artifact is there
    expected = results(whole, whole.manifest(spec.ref), tmp_path / "cache")
    assert results(killed, killed.manifest(spec.ref), tmp_path / "cache") == expected
    assert [line["step"] for line in expected[1]] == [0, 1, 2, 3, 4]
