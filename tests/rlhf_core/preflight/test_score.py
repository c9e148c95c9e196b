"""The stage `score` before anything runs: columns, and what its reward models can read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rlhf_core.recipes import Change, Problems, both, put

pytestmark = pytest.mark.parts

GIVEN = {"format": "completions", "source": {"type": "files", "paths": ["rewarded.jsonl"]}, "on_overlap": "allow"}
SAMPLED = {
    "stage": "generate", "dataset": "prompts", "model": "sft", "sampling": {"max_tokens": 8},
    "rollout": {"max_length": 64},
}  # fmt: skip
EXACT = {"exact": {"type": "verifier"}}
JUDGE = {
    "good": {
        "type": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", "pattern": "(.)",
        "template": "{{ messages[0].content }} {{ prompt }} {{ completion }}",
    }
}  # fmt: skip
WHOLE = {"whole": {"type": "reward_model"}}


def scored(**settings: Any) -> Change:
    return both(put("data", "given", value=GIVEN), put("sampled", value=SAMPLED), put("score", value=settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dataset": "given", "rewards": {"own": {"type": "function", "path": "rewards.py"}}}, []),
        ({"dataset": "sampled", "prompts": "prompts", "rewards": EXACT}, []),
        ({"conversations": "talks", "prompts": "prompts", "rewards": EXACT}, []),
        ({"dataset": "given", "rewards": WHOLE, "max_length": 64}, []),
        ({"dataset": "given", "rewards": JUDGE}, []),
        ({"conversations": "talks", "rewards": JUDGE}, []),
        (
            {"conversations": "talks", "rewards": EXACT},
            ["score.rewards.exact: it reads the column `answer`, which completions have not: set score.prompts to the"],
        ),
        (
            {"dataset": "given", "rewards": EXACT},
            ["score.rewards.exact: the verifier `exact` needs the column `answer`, which `data.given` lacks at r"],
        ),
        (
            {"dataset": "sampled", "rewards": EXACT},
            ["score.rewards.exact: it reads the column `answer`, which completions have not: set score.prompts to the"],
        ),
        (
            {"dataset": "given", "rewards": WHOLE, "max_length": 65},
            ["score.rewards.whole: its context is 64 tokens, and sequences have up to max_length=65"],
        ),
        (
            {"dataset": "given", "rewards": WHOLE, "max_length": 8},
            ["score.rewards.whole: rewarded.jsonl line 1: a completion has "],
        ),
        (
            {"dataset": "talks", "rewards": WHOLE, "max_length": 64},
            ["score.dataset: `talks` has the format conversations, score needs completions"],
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(problems: Problems, settings: dict[str, Any], expected: list[str]) -> None:
    found = problems(scored(**settings))
    assert len(found) == len(expected), found
    assert all(sentence.startswith(begin) for sentence, begin in zip(found, expected, strict=True)), found
