"""What a run is called."""

from __future__ import annotations

import pytest

from flows.names import run_name, run_tags
from rlhf_core.recipe.loading import load_recipe


@pytest.mark.parametrize(("overrides", "only", "name"), [
    ([], None, "tiny, seed 0"),
    (["seed=3", "rl.steps=2", "rl.engine.zero_stage=2"], None, "tiny, seed 3: rl.steps=2 rl.engine.zero_stage=2"),
    (["rl.steps=2"], ["rl"], "tiny/rl, seed 0: rl.steps=2"),
])  # fmt: skip
def test_a_name_has_recipe_seed_and_overrides(overrides: list[str], only: list[str] | None, name: str) -> None:
    recipe = load_recipe("tiny", overrides).recipe
    assert run_name(recipe, overrides, only) == name
    assert run_tags(recipe) == ["tiny", "grpo"]


def test_a_name_is_cut() -> None:
    recipe = load_recipe("tiny").recipe
    name = run_name(recipe, ["rl.steps=2"] * 50)
    assert len(name) == 200
    assert name.endswith("…")
