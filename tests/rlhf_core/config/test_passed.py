"""Settings passed on to a library: refused ones are named in the recipe, others are part of the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.base import result_settings
from rlhf_core.config.engines.passed import DEEPSPEED, VLLM, passed_settings
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipe_text import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(RECIPE, encoding="utf-8")
    return str(tmp_path / "small.yaml")


@pytest.mark.parametrize(
    ("override", "problems"),
    [
        (
            "rl.rollout.vllm={dtype: float16, block_size: 16, quantization: fp8}",
            [
                "`rl.rollout.vllm.dtype`: the recipe sets it: use `engine.dtype`",
                "`rl.rollout.vllm.quantization`: the engine must compute with the published weights",
            ],
        ),
        ("rl.rollout={max_length: 64, type: vllm, vllm: {seed: 1}}", ["`rl.rollout.vllm.seed`: the recipe sets it"]),
        (
            "rl.engine.deepspeed={zero_optimization: {stage: 3, reduce_scatter: false}, optimizer: {type: Adam}}",
            [
                "`rl.engine.deepspeed.zero_optimization.stage`: the recipe sets it: use `engine.zero_stage`",
                "`rl.engine.deepspeed.optimizer`: the recipe sets it: use `optimizer`",
            ],
        ),
        (
            "rl.engine.deepspeed.zero_optimization=true",
            ["`rl.engine.deepspeed.zero_optimization`: it must be a mapping"],
        ),
        (
            "rl.grpo.kl={engine: {deepspeed: {fp16: {enabled: true}}}}",
            ["`rl.grpo.kl.engine.deepspeed.fp16`: the recipe sets it: use `engine.dtype`"],
        ),
    ],
)
def test_what_would_break_a_guarantee_is_refused_with_its_reason(
    recipe: str, override: str, problems: list[str]
) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe, [override])
    lines = str(raised.value).splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert problem in line


def test_what_is_passed_on_is_part_of_the_key_and_an_empty_mapping_is_not() -> None:
    plain, passed = EngineConfig(), EngineConfig(deepspeed={"wall_clock_breakdown": True})
    assert "deepspeed" not in result_settings(plain)
    assert result_settings(passed) == {**result_settings(plain), "deepspeed": {"wall_clock_breakdown": True}}
    engine, other = VllmEngineConfig(max_length=8), VllmEngineConfig(max_length=8, vllm={"block_size": 16})
    assert "vllm" not in result_settings(engine)
    assert result_settings(other) == {**result_settings(engine), "vllm": {"block_size": 16}}


def test_each_setting_that_passes_something_on_is_found(recipe: str) -> None:
    overrides = [
        "rl.rollout.vllm.block_size=16",
        "rl.engine.deepspeed.disable_python_gc=true",
        "rl.grpo.kl={coefficient: 0.1, engine: {deepspeed: {disable_python_gc: false}}}",
    ]
    rl = load_recipe(recipe, overrides).recipe.blocks["rl"]
    found = {path: (library, settings) for path, library, settings in passed_settings(rl)}
    assert found == {
        "rollout.vllm": (VLLM, {"block_size": 16}),
        "engine.deepspeed": (DEEPSPEED, {"disable_python_gc": True}),
        "grpo.kl.engine.deepspeed": (DEEPSPEED, {"disable_python_gc": False}),
    }
