"""The checks together."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from rlhf_core.stages.table import STAGES
from tests.rlhf_core.recipes import (
    OPTIMIZER,
    Problems,
)

pytestmark = pytest.mark.parts


def test_the_table_of_stages_names_checks_that_are_there() -> None:
    assert all(callable(resolve_name(stage.checks)) for stage in STAGES.values() if stage.checks)


def test_a_right_recipe_passes(problems_of_code: Problems) -> None:
    assert problems_of_code(None) == []


def test_all_problems_are_said_at_once(problems_of_code: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "talks.jsonl").unlink()
        (root / "rewards.py").write_text("")
        recipe["base"]["source"]["heads"] = 3

    assert [problem.partition(":")[0] for problem in problems_of_code(change)] == [
        "data.talks",
        "rl.ppo.rewards.own",
        "base.source",
    ]


def test_what_no_stage_uses_is_not_checked(problems_of_code: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "pairs.jsonl").unlink()
        recipe["rl"] |= {
            "algorithm": "grpo",
            "grpo": {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER},
        }
        recipe["rl"]["ppo"]["rewards"]["own"]["path"] = "no.py"

    assert problems_of_code(change) == []
