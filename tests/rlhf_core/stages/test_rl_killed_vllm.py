"""RL as a job, with two vLLM engines and two DeepSpeed ranks: killed in the middle of a step, and submitted again.

Here PPO with adapters, ranks and engines taking turns, at ZeRO 3. Where the machine can be two nodes, tests/two_nodes
does it instead, with GRPO and all weights at ZeRO 2; `make rl-matrix` runs all combinations.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.rlhf_core.stages.killed_jobs import killed_and_whole
from tests.rlhf_core.stages.rl_jobs import job_inputs, two_by_two
from tests.two_nodes.machines import obstacle


@pytest.mark.skipif(not obstacle(), reason="tests/two_nodes kills such a job; `make rl-matrix` kills this one")
@pytest.mark.timeout(1200)  # three starts of engines and ranks, two of them side by side
def test_a_killed_job_ends_as_if_it_had_not_been(ray_cluster: None, tmp_path: Path) -> None:
    config = two_by_two(3, "ppo", lora=True, hybrid=True)
    address = ray.get_runtime_context().gcs_address
    found = killed_and_whole(config, job_inputs(tmp_path / "inputs"), tmp_path, address)
    assert f'"phase": "resumes after step {found.resumed_after}"' in found.log
    assert found.killed == found.whole
    assert [line["step"] for line in found.whole[1]] == [0, 1, 2, 3, 4]
