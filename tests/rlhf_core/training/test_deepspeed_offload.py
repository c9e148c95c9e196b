"""An engine that lends its device between steps computes what it would have computed anyway."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.endurance("architectures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def tensors_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """What a checkpoint would keep, under any name."""
    state = engine.state()
    return {**state.shared, **state.own}


@pytest.mark.parametrize(
    ("settings", "lora"),
    [
        ({"zero_stage": 0}, None), ({"zero_stage": 1}, None), ({"zero_stage": 2}, LoraConfig(rank=2)),
        ({"zero_stage": 3}, None), ({"zero_stage": 3}, LoraConfig(rank=2)),
        ({"zero_stage": 2, "offload_optimizer": True}, None), ({"zero_stage": 2, "dtype": "bfloat16"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_offloaded_between_steps(folder: Path, settings: dict[str, object], lora: LoraConfig | None) -> None:
    results = []
    for lends in (False, True):
        torch.manual_seed(0)
        engine = build(folder, lora=lora, **settings)
        metrics = []
        for _ in range(3):
            if lends:
                engine.offload()
                engine.reload()
            metrics.append(engine.step([batch()], loss))
            if lends:
                before = tensors_of(engine)
                before = {name: tensor.clone() for name, tensor in before.items()}
                engine.offload()
                away = tensors_of(engine)
                assert all(torch.equal(away[name], before[name]) for name in before)  # a checkpoint can be taken
                engine.reload()
        results.append((metrics, weights_of(engine)))
    (plain, weights), (lent, lent_weights) = results
    assert lent == plain
    assert weights.keys() == lent_weights.keys()
    assert all(torch.equal(weights[name], lent_weights[name]) for name in weights)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_frozen_model_too(folder: Path, zero_stage: int) -> None:
    engine = build(folder, optimizer=None, zero_stage=zero_stage)
    before = engine.forward([batch()], lambda model, b: model(b)[0])[0]
    engine.offload()
    engine.reload()
    assert torch.equal(engine.forward([batch()], lambda model, b: model(b)[0])[0], before)
