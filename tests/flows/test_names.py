"""What a run is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.names import run_name, run_tags
from rlhf_core.pipeline.loading import load_recipe
from tests.chaos.scenario import write_recipe


@pytest.mark.parametrize(("overrides", "only", "name"), [
    ([], None, "chaos, seed 0"),
    (["seed=3", "rl.steps=2", "rl.engine.zero_stage=2"], None, "chaos, seed 3: rl.steps=2 rl.engine.zero_stage=2"),
    (["rl.steps=2"], ["rl"], "chaos/rl, seed 0: rl.steps=2"),
])  # fmt: skip
def test_a_name_has_recipe_seed_and_overrides(
    tmp_path: Path, overrides: list[str], only: list[str] | None, name: str
) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path / "recipe")), overrides).recipe
    assert run_name(recipe, overrides, only) == name
    assert run_tags(recipe) == ["chaos", "grpo"]


def test_a_name_is_cut(tmp_path: Path) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path / "recipe"))).recipe
    name = run_name(recipe, ["rl.steps=2"] * 50)
    assert len(name) == 200
    assert name.endswith("…")
