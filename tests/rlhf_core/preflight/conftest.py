"""Fixtures of checks before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import RecipeError
from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import Change, Problems, write


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """What preflight says of the good recipe after a change to it, or to its files."""

    def check(change: Change | None) -> list[str]:
        loaded = load_recipe(write(tmp_path, change))
        try:
            preflight(loaded)
        except RecipeError as error:
            return str(error).splitlines()
        return []

    return check
