from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.errors import RecipeError
from rlhf_core.graph.user_files import named_variables, user_files

OPTIMIZER = {"learning_rate": 1e-3}


def test_variables_of_reward_servers_are_found_where_they_are_used() -> None:
    judge = {"type": "http", "url_variable": "JUDGE", "header_variable": "ALIGNMENT_HEADER_A"}
    other = {"type": "http", "url": "http://judge.example", "header_variable": "ALIGNMENT_HEADER_B"}
    config = RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "d", "steps": 1, "prompts_per_step": 1, "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 16}, "monitors": {"m": {"type": "http", "url_variable": "WATCH"}},
        "grpo": {"rewards": {"a": judge, "b": {"type": "verifier"}}, "optimizer": OPTIMIZER},
        "rloo": {"rewards": {"c": other}, "optimizer": OPTIMIZER},
    })  # fmt: skip
    assert named_variables(config) == {"JUDGE", "ALIGNMENT_HEADER_A", "WATCH"}
    assert named_variables(config.model_copy(update={"algorithm": "rloo"})) == {"ALIGNMENT_HEADER_B", "WATCH"}


def test_a_chat_template_file_is_the_users_and_a_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("a")
    source = {"type": "scratch"}
    named = BaseModelConfig.model_validate({"source": source, "chat_template": "own.jinja"})
    first = user_files(named, tmp_path)
    assert list(first) == ["own.jinja"]
    (tmp_path / "own.jinja").write_text("b")
    assert user_files(named, tmp_path) != first
    assert user_files(BaseModelConfig.model_validate({"source": source, "chat_template": "plain"}), tmp_path) == {}
    with pytest.raises(RecipeError, match=r"other\.jinja: the recipe names this file, but there is no such file"):
        user_files(named.model_copy(update={"chat_template": "other.jinja"}), tmp_path)
