"""Thresholds that no reward of the recipe, or of its rows, can reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhf_core.config.rewards.rewards import RewardConfig
from rlhf_core.preflight.stages.bounds import bounds_of_sum
from tests.rlhf_core.recipes import OPTIMIZER, Change, Problems, both, put

pytestmark = pytest.mark.parts

SAMPLED = {"stage": "generate", "model": "sft", "dataset": "prompts", "sampling": {"max_tokens": 8}, "samples": 2,
           "rollout": {"max_length": 64}, "rewards": {"exact": {"type": "verifier", "weight": 2.0}}}  # fmt: skip
ROWS = [[0, 1, 5], [4, 6]]  # rewards of the completions of each prompt


def made(stage: str, *, of: str = "sampled", **settings: Any) -> Change:
    """A stage that selects among what `sampled` samples, with rewards of 0 or 2, or among ROWS."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        rows = [
            {"prompt": f"q{i}", "completions": [{"text": f"a{reward}", "reward": reward} for reward in rewards]}
            for i, rewards in enumerate(ROWS)
        ]
        unrewarded = [{"prompt": "q", "completion": "a"}]
        for name, given in {"rows": rows, "unrewarded": unrewarded}.items():
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
            source = {"type": "files", "paths": [f"{name}.jsonl"]}
            recipe["data"][name] = {"format": "completions", "source": source}
        recipe["sampled"] = SAMPLED
        recipe["made"] = {"stage": stage, "dataset": of, **settings}
        recipe["evaluation"]["models"] = ["sft"]

    return change


def grpo(**block: Any) -> Change:
    exact = {"exact": {"type": "verifier"}}
    settings = {"rewards": exact, "optimizer": OPTIMIZER, "group_size": 2, **block}
    return both(put("rl", "algorithm", value="grpo"), put("rl", "grpo", value=settings))


ENVIRONMENT = {"given": {"type": "environment", "weight": 3.0}}
RETRY = put("rl", "environment", value={"type": "retry", "max_turns": 2})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (made("pairs", margin=1.9), []),
        (made("pairs", margin=2),
         "made.margin is 2, and the rewards of its completions are from 0 to 2: no two are further apart than"),
        (made("best_of_n", least_reward=2), []),
        (made("best_of_n", least_reward=2.5),
         "made.least_reward is 2.5, and the rewards of its completions are from 0 to 2: nothing would be left: lower"),
        (made("unpaired", threshold=2), []),
        (made("unpaired", threshold=2.5), "made.threshold is 2.5, and the rewards of its completions are from 0 to 2"),
        (made("unpaired", threshold=0), "made.threshold is 0, and the rewards of its completions are from 0 to 2"),
        (made("unpaired", threshold=1, margin=1.5), "made.threshold is 1, with a margin of 1.5, and the rewards of"),
        (made("pairs", of="rows"), []),
        (made("best_of_n", of="unrewarded"),
         "made.dataset: unrewarded.jsonl line 1: a completion has no `reward`, which this stage reads"),
        (grpo(cross_entropy={"coefficient": 1.0, "least_reward": 1}), []),
        (grpo(cross_entropy={"coefficient": 1.0, "least_reward": 2}),
         "rl.grpo.cross_entropy.least_reward is 2, and rewards are at most 1: no completion would be imitated"),
        (both(RETRY, grpo(rewards=ENVIRONMENT, cross_entropy={"coefficient": 1.0, "least_reward": 4})),
         "rl.grpo.cross_entropy.least_reward is 4, and rewards are at most 3: no completion would be imitated"),
        (grpo(rewards={"j": {"type": "judge", "url": "http://127.0.0.1:9", "model": "m", "pattern": "(.)",
                             "template": "{{ completion }}", "verdicts": {"a": 1}}}),
         "rl.grpo.rewards: all completions get the reward 1, so nothing tells them apart: add another"),
        (grpo(shaping={"clip": [-1, 0]}),
         "rl.grpo.shaping.clip is [-1, 0], rewards are from 0 to 1: all would be the same, and nothing would be"),
        (grpo(shaping={"clip": [-1, 0], "overlong": {"buffer": 2}}), []),
        (grpo(shaping={"clip": [1, 2], "truncation": {"reward": 1.5}}), []),
    ],
)  # fmt: skip
def test_what_no_reward_can_reach_is_one_sentence(
    problems: Problems, change: Change, expected: str | list[str]
) -> None:
    said = problems(change)
    if not expected:
        assert said == []
        return
    (problem,) = said
    assert problem.startswith(str(expected))


def test_the_bounds_of_a_sum() -> None:
    judge = {"type": "judge", "url": "http://a.b", "model": "m", "pattern": "(.*)", "template": "{{ completion }}"}
    rewards: list[RewardConfig] = [
        TypeAdapter(RewardConfig).validate_python(given)
        for given in (
            {"type": "verifier", "weight": 2.0},
            {**judge, "verdicts": {"good": 3, "bad": -1}, "weight": -0.5},
            {"type": "environment", "weight": 1.0},
            {"type": "reward_model", "weight": 0.0},
        )
    ]
    assert bounds_of_sum(rewards[:2]) == (-1.5, 2.5)
    assert bounds_of_sum(rewards, environment=(0.0, 1.0)) == (-1.5, 3.5)
    assert bounds_of_sum(rewards) is None
