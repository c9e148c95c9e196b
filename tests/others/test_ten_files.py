"""Ten files of others, as their documentation describes them: four rewards, three agents, three configurations.

The other modules of this folder have what each of them may differ in, and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.others.test_agents import SHOP, Play, called, play, tokenizer
from tests.others.test_configurations import check, folder, translated
from tests.others.test_rewards import VERL, Judge, judge

__all__ = ["folder", "judge", "play", "tokenizer"]  # fixtures

pytestmark = [
    pytest.mark.endurance("mutations"),
    pytest.mark.slow("the first one starts what all are forks of"),
    pytest.mark.usefixtures("forked"),
]

SUM: dict[str, Any] = {"prompt": [{"role": "user", "content": "2+2, please"}], "ground_truth": "4", "solution": "4"}


@pytest.mark.parametrize(
    ("file", "form", "function", "sample", "reward"),
    [
        ("trl_text.py", "trl", "accuracy_reward", ("<answer>4</answer>", "2+2", SUM), 1.0),
        ("trl_conversational.py", "trl_conversational", "polite_and_right", ("Please: 4", "2+2, please", SUM), 1.5),
        ("openrlhf_func.py", "openrlhf", "reward_func", (" it is 15", "2+2?", {"answer": "4"}), -1.0),
        ("verl_score.py", "verl", "compute_score", ("#### 72", "p", VERL), 1.0),
    ],
)
def test_a_reward_is_called(judge: Judge, file: str, form: str, function: str, sample: Any, reward: float) -> None:
    assert judge(file, form, function, [sample]).rewards == [reward]


@pytest.mark.parametrize(
    ("file", "function", "form", "replies", "row", "settings", "reward"),
    [
        ("openrlhf_agent.py", "AgentExecutor", "openrlhf", ["x", "ab"], {"answer": "b"}, {}, 0.75),
        ("openrlhf_executor.py", "AgentExecutor", "openrlhf", ["x", "b"], {"answer": "b"}, {}, 1.0),
        ("trl_environment.py", "Shop", "trl", [called("buy", thing="tea"), "done"], {"budget": 9}, SHOP, 5.0),
    ],
)
def test_an_agent_plays_an_episode(
    play: Play, file: str, function: str, form: str, replies: list[str], row: Any, settings: Any, reward: float
) -> None:
    made = play(file, function, form, replies, row, **settings)
    assert (made.environment_reward, made.turns) == (reward, 2)


@pytest.mark.parametrize(
    ("framework", "file"), [("trl", "train_grpo.py"), ("openrlhf", "train_ppo.sh"), ("verl", "run_grpo.sh")]
)
def test_a_configuration_becomes_a_recipe_that_can_be_planned(folder: Path, framework: str, file: str) -> None:
    translated(framework, f"{framework}/{file}")
    assert "rl" in check("mine/recipe.yaml", []).graph
