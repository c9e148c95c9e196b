"""Rewards and scorers that cannot work."""

from __future__ import annotations

import json

import pytest

from tests.rlhf_core.pipeline.recipes import (
    Change,
    Problems,
    both,
    file,
    put,
    validation,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            file("rewards.py", "def reward(\n"),
            "rl.ppo.rewards.own: rewards.py: syntax error in line 1: '(' was never closed",
        ),
        (file("rewards.py", "x = 1\n"), "rl.ppo.rewards.own: rewards.py: there is no function `reward`"),
        (
            put("rl", "ppo", "rewards", "own", "path", value="no.py"),
            "rl.ppo.rewards.own: no.py: there is no such file",
        ),
        (
            put(
                "rl",
                "validation",
                value=validation(
                    also={
                        "far": {
                            "dataset": "prompts",
                            "scorers": {"gym": {"type": "verifier", "kind": "reasoning_gym"}},
                        }
                    }
                ),
            ),
            "rl.validation.also.far.scorers.gym: the verifier `reasoning_gym` needs the column `task`",
        ),
        (
            file("prompts.jsonl", json.dumps({"prompt": "a"})),
            "evaluation.scorers.exact: the verifier `exact` needs the column `answer`, "
            "which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a"})),
                put("rl", "environment", value={"type": "retry", "max_turns": 2}),
            ),
            "rl.environment: `retry` needs the column `answer`, which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            put("evaluation", "scorers", "exact", "kind", value="reasoning_gym"),
            "the verifier `reasoning_gym` needs the column `task`",
        ),
    ],
)
def test_one_thing_wrong_with_a_reward_is_one_sentence(problems: Problems, change: Change, expected: str) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said
