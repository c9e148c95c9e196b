"""The newer algorithms of GRPO's family learn on real parts, with several updates per batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.contract import Input
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.test_rl import OPTIMIZER, SHORT, model, run, write_reward

__all__ = ["model"]
pytestmark = [pytest.mark.endurance("rl-matrix"), pytest.mark.slow("RL until it has learned")]


@pytest.mark.parametrize(
    ("algorithm", "block", "sampling"),
    [
        ("sapo", {}, {}),
        ("gmpo", {"mismatch": {"correction": "mask", "ratio_of": "geometric_mean", "low": 0.5, "high": 2.0}}, {}),
        ("dppo", {"divide_by_deviation": "batch"}, {}),
        ("grpo", {"mismatch": {"correction": "truncate", "ratio_of": "sequence", "low": 0.0, "high": 2.0}},
         {"stop": ["e", "a"]}),
    ],
)  # fmt: skip
def test_it_learns_with_several_updates_per_batch(
    algorithm: str, block: dict[str, Any], sampling: dict[str, Any], model: Input, in_process: InProcessCluster,
    tmp_path: Path,
) -> None:  # fmt: skip
    write_reward(tmp_path, "return [float(len(c) <= 1) for c in completions]")
    settings = {"rewards": SHORT, "group_size": 8, "optimizer": OPTIMIZER, "minibatches": 2, **block}
    _, context = run(
        tmp_path, {"algorithm": algorithm, algorithm: settings, "steps": 8, "sampling": {"max_tokens": 4, **sampling}},
        model, in_process,
    )  # fmt: skip
    rewards = [metrics["reward"] for _, metrics in context.logs]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.5
    assert all(metrics["rollout_mismatch"] < 1e-4 for _, metrics in context.logs)
