"""Settings that a recipe passes on to DeepSpeed: validated by it, and merged into ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines.passed import DEEPSPEED
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.training.deepspeed_passed import _Recorded, problems
from rlhf_core.training.deepspeed_settings import deepspeed_settings, import_deepspeed
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model

pytestmark = pytest.mark.parts

OURS_TO_REPLACE = {"zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"zero_optimization": {"reduce_scatter": False, "reduce_bucket_size": 1000}}, {}),
        ({"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True, "aio": {"block_size": 1}}, {}),
        (
            {"wall_clock_breakdwon": True},
            {"wall_clock_breakdwon": "DeepSpeed has no such setting (did you mean `wall_clock_breakdown`?)"},
        ),
        (
            {"zero_optimization": {"reduce_scater": False, "leaf_module": {"clases": []}}},
            {
                "zero_optimization.reduce_scater": "DeepSpeed has no setting `reduce_scater` here (did you mean "
                "`reduce_scatter`?)",
                "zero_optimization.leaf_module.clases": "DeepSpeed has no setting `clases` here (did you mean "
                "`classes`?)",
            },
        ),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_sise": 1}},
            {"zero_optimization.stage3_prefetch_bucket_sise": "did you mean `stage3_prefetch_bucket_size`?"},
        ),
        ({"aio": {"blok_size": 1}}, {"aio.blok_size": "DeepSpeed has no such setting (did you mean `block_size`?)"}),
        ({"wall_clock_breakdown": 1}, {"wall_clock_breakdown": "it must be true or false"}),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            {"zero_optimization.reduce_bucket_size": "Input should be greater than 0"},
        ),
        ({"sparse_attention": {}}, {"sparse_attention": "DeepSpeed does not take it: "}),
    ],
)
def test_deepspeed_says_what_it_does_not_know(settings: dict[str, Any], wrong: dict[str, str]) -> None:
    found = dict(problems(settings))
    assert found.keys() == wrong.keys()
    for name, problem in wrong.items():
        assert problem in found[name]


def names(settings: dict[str, Any], at: str = "") -> set[str]:
    """Dotted names, of blocks and of what is in them."""
    return {f"{at}{name}" for name in settings} | {
        inner for name, value in settings.items() if isinstance(value, dict) for inner in names(value, f"{at}{name}.")
    }


def is_refused(name: str) -> bool:
    return any(name == refused or name.startswith(f"{refused}.") for refused in DEEPSPEED.refused)


def test_what_we_set_is_refused_except_sizes_of_buckets() -> None:
    configs: list[dict[str, Any]] = [
        {"dtype": "float32", "zero_stage": 0},
        {"zero_stage": 2, "offload_optimizer": True, "overlap_comm": True},
        {"zero_stage": 3, "offload_parameters": True, "hpz_partition_size": 2},
    ]
    optimizer = OptimizerConfig(learning_rate=0.1)
    ours = set.union(*(names(deepspeed_settings(EngineConfig(**config), optimizer, 100)) for config in configs))
    assert {name for name in ours if not is_refused(name)} == {"zero_optimization", *OURS_TO_REPLACE}


def test_deepspeed_knows_each_refused_name() -> None:
    """A new release may rename one, which would be passed on then."""
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = _Recorded({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(asked)
    known = set(asked.asked) | {
        f"zero_optimization.{name}" for n, info in DeepSpeedZeroConfig.model_fields.items() for name in (n, info.alias)
    }
    looked_for_in_keys = {"optimizer", "scheduler", "autotuning", "activation_checkpointing"}
    only_in_a_group = {"sequence_parallel_size"}
    assert set(DEEPSPEED.refused) - known <= looked_for_in_keys | only_in_a_group


def test_passed_settings_reach_the_engine_and_a_wrong_one_ends_its_start(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    passed = {"zero_optimization": {"reduce_bucket_size": 200, "ignore_unused_parameters": False}}
    engine = build(folder, zero_stage=2, deepspeed=passed)
    zero = engine._engine._config.zero_config
    assert (zero.reduce_bucket_size, zero.ignore_unused_parameters, zero.stage) == (200, False, 2)
    assert zero.allgather_bucket_size == build(folder, zero_stage=2)._engine._config.zero_config.allgather_bucket_size
    plain = build(folder, zero_stage=2)
    assert engine.step([batch()], loss) == plain.step([batch()], loss)
    with pytest.raises(StageError, match=re.escape("engine.deepspeed.reduce_scatter: DeepSpeed has no such setting")):
        build(folder, zero_stage=2, deepspeed={"reduce_scatter": False})


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        (2, "float32"),
        (2, "bfloat16"),
        pytest.param(3, "float32", marks=pytest.mark.endurance("architectures")),
    ],
)
def test_without_a_maximum_no_gradient_is_scaled_down(tmp_path: Path, stage: int, dtype: str) -> None:
    folder = tiny_model(tmp_path)
    steps = {}
    for longest in (None, 1e6, 1e-3):
        optimizer = OptimizerConfig(learning_rate=0.01, epsilon=0.1, max_gradient_norm=longest)  # no scale-free step
        engine = build(folder, optimizer=optimizer, zero_stage=stage, dtype=dtype)
        metrics = [engine.step([batch()], loss) for _ in range(2)]
        steps[longest] = [(step.gradient_norm, step.means["loss"]) for step in metrics]
    assert steps[None] == steps[1e6]
    assert steps[None][0][0] > 1e-3
    assert steps[None][1] != steps[1e-3][1]
