from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import RecipeError
from tests.rlhf_core.recipes import OPTIMIZER, Change, Problems

pytestmark = pytest.mark.parts

PLACE = "rl.on_policy_distillation.teacher.hint"


def taught(hint: str, **changes: Any) -> Change:
    def change(recipe: dict[str, Any], folder: Path) -> None:
        teacher = {"model": "sft", "hint": hint}
        recipe["rl"] = {
            **{key: value for key, value in recipe["rl"].items() if key != "ppo"},
            "algorithm": "on-policy-distillation",
            "on_policy_distillation": {"teacher": teacher, "optimizer": OPTIMIZER},
            **changes,
        }

    return change


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (" ({{ row.answer }})", []),
        (" ({{ row.solution }})", [
            f"{PLACE}: `prompts`: prompts.jsonl line 1: teacher.hint: the template cannot be written for row "
        ]),
        ("{{ row.answer * 9 }}", [
            f"{PLACE}: `prompts`: prompts.jsonl line 1 has 59 tokens with its hint, more than the 56 that "
            "rollout.max_length leaves beside sampling.max_tokens: raise it, or set the dataset's on_long_row to drop"
        ]),
    ],
)  # fmt: skip
def test_hints_are_looked_at_before_a_job(hint: str, expected: list[str], problems: Problems) -> None:
    found = problems(taught(hint))
    assert len(found) == len(expected), found
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence


@pytest.mark.parametrize(
    ("hint", "changes", "message"),
    [
        ("{{ answer }}", {}, "the template names `answer`; there are prompt, messages, row"),
        (
            "!",
            {"environment": {"type": "retry", "max_turns": 2}},
            "may fill rollout.max_length, and leave no room for a hint",
        ),
    ],
)
def test_hints_that_no_row_can_have(hint: str, changes: dict[str, Any], message: str, problems: Problems) -> None:
    with pytest.raises(RecipeError, match=message):
        problems(taught(hint, **changes))
