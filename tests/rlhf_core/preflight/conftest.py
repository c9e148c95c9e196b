"""Fixtures of checks before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import RecipeError
from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import Change, Problems, both, put, write


@pytest.fixture
def problems(problems_of_code: Problems) -> Problems:
    """As `problems_of_code`, of a recipe without a user's reward, whose check is a process."""
    plain = put("rl", "ppo", "rewards", "own", value={"type": "verifier"})
    return lambda change: problems_of_code(plain if change is None else both(plain, change))


@pytest.fixture
def problems_of_code(tmp_path: Path) -> Problems:
    """What preflight says of the good recipe after a change to it, or to its files."""

    def check(change: Change | None) -> list[str]:
        loaded = load_recipe(write(tmp_path, change))
        try:
            preflight(loaded)
        except RecipeError as error:
            return str(error).splitlines()
        return []

    return check
