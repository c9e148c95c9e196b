"""Environments whose messages could never be sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import Change, both, file, put, write

pytestmark = pytest.mark.parts


def retry(feedback: str, **settings: Any) -> Change:
    return put("rl", "environment", value={"type": "retry", "max_turns": 2, "feedback": feedback, **settings})


def notes(folder: Path, change: Change) -> list[str]:
    return preflight(load_recipe(write(folder, change)))


TOOLS = {"type": "tools", "parser": "hermes", "tools": {"python": {"type": "python"}}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (retry("no"), []),
        (
            retry("no", max_turns=1),
            ["rl.environment: max_turns is 1, so `feedback` is never said: every reply ends its episode"],
        ),
        (
            put("evaluation", "environment", value={"type": "by_row", "choices": {"t": {**TOOLS, "max_turns": 1}}}),
            ["evaluation.environment.choices.t: max_turns is 1, so the policy never reads what a tool returns"],
        ),
        (
            put(
                "rl",
                "environment",
                value={"type": "by_row", "choices": {"t": {"type": "retry"}, "u": {"type": "retry"}}},
            ),
            ["rl.environment.choices.u: no row that could be read names it, so it may never be played"],
        ),
    ],
)
def test_an_environment_that_is_never_answered_is_noted(tmp_path: Path, change: Change, expected: list[str]) -> None:
    rows = file("prompts.jsonl", json.dumps({"prompt": "a", "answer": "b", "environment": "t"}))
    assert notes(tmp_path, both(rows, change)) == expected
