from __future__ import annotations

from rlhf_core.config.rl import RLConfig
from rlhf_core.pipeline.user_files import named_variables

OPTIMIZER = {"learning_rate": 1e-3}


def test_variables_of_reward_servers_are_found_where_they_are_used() -> None:
    judge = {"type": "http", "url_variable": "JUDGE", "header_variable": "TOKEN"}
    other = {"type": "http", "url": "http://judge.example", "header_variable": "OTHER"}
    config = RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "d", "steps": 1, "prompts_per_step": 1, "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 16}, "monitors": {"m": {"type": "http", "url_variable": "WATCH"}},
        "grpo": {"rewards": {"a": judge, "b": {"type": "verifier"}}, "optimizer": OPTIMIZER},
        "rloo": {"rewards": {"c": other}, "optimizer": OPTIMIZER},
    })  # fmt: skip
    assert named_variables(config) == {"JUDGE", "TOKEN", "WATCH"}
    assert named_variables(config.model_copy(update={"algorithm": "rloo"})) == {"OTHER", "WATCH"}
