"""Environments that could never say what they have to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.pipeline.loading import load_recipe
from rlhf_core.pipeline.preflight import preflight
from tests.rlhf_core.pipeline.recipes import Change, Problems, both, file, put, write


def retry(feedback: str, **settings: Any) -> Change:
    return put("rl", "environment", value={"type": "retry", "max_turns": 2, "feedback": feedback, **settings})


def asking(*lengths: int) -> Change:
    rows = [{"prompt": "a" * length, "answer": "b"} for length in lengths]
    return file("prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def notes(folder: Path, change: Change) -> list[str]:
    return preflight(load_recipe(write(folder, change)))


def test_feedback_must_leave_room_for_a_reply_behind_some_prompt(problems: Problems) -> None:
    """Of 64 tokens the prompt has 23, a reply one at least, feedback 2 around it: 37 characters leave one, 38 none."""
    longest = 38
    assert problems(both(asking(20), retry("a" * (longest - 1)))) == []
    (problem,) = problems(both(asking(20), retry("a" * longest)))
    assert problem.startswith("rl.environment.feedback: it has 40 tokens with what the chat template writes around it,")
    assert "and the shortest prompt has 23, so that rollout.max_length=64 never has room for another reply" in problem
    assert problems(both(asking(20, 19), retry("a" * longest))) == []
    assert problems(both(asking(20), retry("a" * longest, max_turns=1))) == []
    choices = {"type": "by_row", "choices": {"again": {"type": "retry", "feedback": "a" * longest}}}
    rows = [{"prompt": "a" * 20, "answer": "b", "environment": "again"}]
    (problem,) = problems(both(file("prompts.jsonl", json.dumps(rows[0])), put("rl", "environment", value=choices)))
    assert problem.startswith("rl.environment.choices.again.feedback: it has ")


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
            ["rl.environment.choices.u: no row that could be read names it, so that it may never be played"],
        ),
    ],
)
def test_an_environment_that_is_never_answered_is_noted(tmp_path: Path, change: Change, expected: list[str]) -> None:
    rows = file("prompts.jsonl", json.dumps({"prompt": "a", "answer": "b", "environment": "t"}))
    assert notes(tmp_path, both(rows, change)) == expected
