"""A gradient that is not finite changes nothing but the place in the schedule, and a few in a row end the run.

Two ranks are in tests/rlhf_core/training/test_two_ranks.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.engine import StepCounters
from rlhf_core.types import PackedBatch
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.parts

OPTIMIZERS = [
    OptimizerConfig(learning_rate=0.01, schedule="linear", warmup_share=0.0, weight_decay=0.1),
    OptimizerConfig(name="muon", learning_rate=0.01, schedule="linear", warmup_share=0.0, weight_decay=0.1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def broken(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
    value, metrics = loss(model, part)
    return value * float("inf"), metrics


def state(engine: DeepSpeedEngine) -> list[Tensor]:
    """Copies of all weights and of all tensors of the optimizer's state."""
    weights = weights_of(engine)
    assert engine.optimizer is not None
    moments = [value for values in engine.optimizer.state.values() for value in values.values()]
    return [tensor.clone() for tensor in (*weights.values(), *moments)]


ADAMW, MUON = OPTIMIZERS


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (ADAMW, {"zero_stage": 0}),
        (ADAMW, {"zero_stage": 1}),
        (MUON, {"zero_stage": 2}),
        (ADAMW, {"zero_stage": 2, "dtype": "bfloat16"}),
        (ADAMW, {"zero_stage": 3}),
        pytest.param(MUON, {"zero_stage": 3, "dtype": "bfloat16"}, marks=pytest.mark.endurance("architectures")),
    ],
    ids=str,
)
def test_a_skipped_update_changes_nothing_but_the_place_in_the_schedule(
    folder: Path, optimizer: OptimizerConfig, settings: dict[str, Any]
) -> None:
    engine, undisturbed = (build(folder, optimizer=optimizer, **settings) for _ in range(2))
    assert not engine.step([batch()], loss).skipped
    undisturbed.step([batch()], loss)
    before = state(engine)
    metrics = engine.step([batch(), batch()], broken)
    assert metrics.skipped
    assert not math.isfinite(metrics.gradient_norm)
    assert all(torch.equal(old, new) for old, new in zip(before, state(engine), strict=True))
    assert engine.counters == StepCounters(steps=2, skipped_updates=1, skipped_in_a_row=1)

    undisturbed.counters = StepCounters(steps=2)
    after, expected = engine.step([batch()], loss), undisturbed.step([batch()], loss)
    assert after == expected
    assert after.learning_rate == pytest.approx(0.004)  # of 0.01, 0.007, 0.004, 0.001
    assert all(torch.equal(old, new) for old, new in zip(state(engine), state(undisturbed), strict=True))
    assert engine.counters == StepCounters(steps=3, skipped_updates=1, skipped_in_a_row=0)


@pytest.mark.parametrize("stage", [0, 2])
def test_too_many_in_a_row_end_the_run(folder: Path, stage: int) -> None:
    optimizer = OptimizerConfig(learning_rate=0.01, max_skipped_updates=2)
    engine = build(folder, optimizer=optimizer, zero_stage=stage)
    for part in (broken, loss, broken):
        engine.step([batch()], part)
    before = state(engine)
    with pytest.raises(StageError, match=r"^2 updates in a row were skipped, the last at optimizer step 3: "):
        engine.step([batch()], broken)
    assert all(torch.equal(old, new) for old, new in zip(before, state(engine), strict=True))


@pytest.mark.parametrize("settings", [{"zero_stage": 2}, {"zero_stage": 3, "offload_parameters": True}], ids=str)
def test_an_offloaded_optimizer_skips_too(folder: Path, settings: dict[str, Any]) -> None:
    engine = build(folder, optimizer=OPTIMIZERS[0], offload_optimizer=True, **settings)
    engine.step([batch()], loss)
    before = state(engine)
    assert engine.step([batch()], broken).skipped
    assert all(torch.equal(old, new) for old, new in zip(before, state(engine), strict=True))
    assert not engine.step([batch()], loss).skipped
