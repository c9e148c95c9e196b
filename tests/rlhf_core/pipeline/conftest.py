"""What plan and run say before any job."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.config.loading import load_recipe
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.preflight import preflight
from tests.rlhf_core.pipeline.recipes import FILES, RECIPE, Change, Problems


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """What preflight says of the good recipe after a change to it, or to its files."""
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text("def reward(completions, prompts, rows):\n    return [0.0] * len(prompts)\n")

    def check(change: Change | None) -> list[str]:
        recipe = copy.deepcopy(RECIPE)
        if change is not None:
            change(recipe, tmp_path)
        with (tmp_path / "recipe.yaml").open("w") as file:
            YAML(typ="safe").dump(json.loads(json.dumps(recipe)), file)
        loaded = load_recipe(str(tmp_path / "recipe.yaml"))
        try:
            preflight(loaded)
        except RecipeError as error:
            return str(error).splitlines()
        return []

    return check
