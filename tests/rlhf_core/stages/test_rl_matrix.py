"""RL as a job, with two vLLM engines and two DeepSpeed ranks: killed in the middle of a step, and submitted again.

Eight of the twenty-five combinations that `make rl-matrix` runs: between them each choice is made in both ways.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.stages.table import STAGES
from tests.rl_matrix import COMBINATIONS
from tests.rlhf_core.stages.killed_jobs import engine_killed_and_whole, killed_and_whole
from tests.rlhf_core.stages.rl_jobs import job_inputs

pytestmark = [
    pytest.mark.endurance("rl-matrix"),
    pytest.mark.slow("three starts of engines and ranks, two of them side by side"),
    pytest.mark.timeout(1200),
]


@pytest.mark.parametrize(
    "name",
    [
        "grpo-full-zero2-own",
        "ppo-lora-zero3-hybrid",
        "ppo-lora-zero2-sequence",
        "ppo-full-zero2-tensor",
        "grpo-qlora-zero2-own",
        "ppo-lora-zero2-hybrid-ipc",
        "ppo-full-zero2-group",
        "grpo-full-zero3-hybrid-spread-ipc",
    ],
)
def test_a_killed_job_ends_as_if_it_had_not_been(ray_cluster: None, tmp_path: Path, name: str) -> None:
    address = ray.get_runtime_context().gcs_address
    config = COMBINATIONS[name]
    found = killed_and_whole(config, job_inputs(tmp_path / "inputs", config), tmp_path, address)
    assert f'"phase": "resumes after step {found.resumed_after}"' in found.log
    assert found.killed == found.whole
    assert [line["step"] for line in found.whole[1]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grpo-full-zero2-hybrid", "died in generate: .*; engine [01] restarted, [0-9]+ episodes are played again"),
        ("ppo-lora-zero2-own", "died in load: .*; engine [01] restarted, version 1 is published again"),
    ],
    ids=["while it samples", "while it is published to"],
)
def test_an_engine_that_is_killed_is_started_again_and_the_job_goes_on(
    ray_cluster: None, tmp_path: Path, name: str, said: str
) -> None:
    address = ray.get_runtime_context().gcs_address
    config = COMBINATIONS[name]
    whole, killed, log = engine_killed_and_whole(config, job_inputs(tmp_path / "inputs", config), tmp_path, address)
    assert re.search(said, log)
    assert "resumes after" not in log
    assert killed == whole


@pytest.mark.parametrize("publish", ["in_flight", "between_replies"])
def test_an_engine_that_is_killed_while_ranks_train_is_started_again(
    ray_cluster: None, tmp_path: Path, publish: str
) -> None:
    settings = COMBINATIONS["grpo-full-zero2-own"].model_dump(mode="json")
    rollout = {**settings["rollout"], "repeatable": False}
    config = RLConfig.model_validate({
        **settings, "rollout": rollout, "asynchronous": {"max_lag": 1, "publish": publish},
        "grpo": {**settings["grpo"], "mismatch": None},
    })  # fmt: skip
    address = ray.get_runtime_context().gcs_address
    _, killed, log = engine_killed_and_whole(config, job_inputs(tmp_path / "inputs", config), tmp_path, address)
    assert re.search("engine [01] died in .*; engine [01] restarted, .* again", log)
    assert "resumes after" not in log
    assert [line["step"] for line in killed[1]] == [0, 1, 2, 3, 4]
    assert max(line["asynchronous/largest_lag"] for line in killed[1]) <= 1


@pytest.mark.parametrize("stage", ["evaluation", "generate"])
def test_an_engine_that_is_killed_in_a_stage_that_samples_is_started_again(
    ray_cluster: None, tmp_path: Path, stage: str
) -> None:
    """While the rewards of the first two prompts are computed."""
    function = {"type": "function", "path": "reward.py"}
    of_stage: dict[str, Any] = {
        "evaluation": {"scorers": {"short": function}, "pass_at": (1,)},
        "generate": {"rewards": {"short": function}, "model": "model"},
    }
    config = STAGES[stage].config.model_validate({
        "dataset": "prompts", "samples": 2, "sampling": {"max_tokens": 4}, "prompts_per_call": 2,
        "rollout": {"max_length": 32, "cpu_cache_gib": 0.25, "engines": 2, "cpus_per_engine": 0.5}, **of_stage[stage],
    })  # fmt: skip
    address = ray.get_runtime_context().gcs_address
    whole, killed, log = engine_killed_and_whole(config, job_inputs(tmp_path / "inputs"), tmp_path, address, stage)
    assert re.search("died in generate: .*; engine [01] restarted, [0-9]+ episodes are played again", log)
    assert killed == whole


def test_a_stopped_job_ends_its_step_with_the_user_s_rewards(ray_cluster: None, tmp_path: Path) -> None:
    """Their process gets Ray's signal too."""
    address = ray.get_runtime_context().gcs_address
    config = COMBINATIONS["grpo-full-zero2-own"]
    found = killed_and_whole(config, job_inputs(tmp_path / "inputs", config), tmp_path, address, stops=True)
    assert found.resumed_after == found.held_after + 1
    assert f"the job was stopped; it resumes after step {found.resumed_after}, whose checkpoint is stored" in found.log
    assert found.killed == found.whole
