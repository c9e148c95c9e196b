"""The reference model: the policy's base with its adapter off, or a frozen copy that may stay in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.training.reference import AdapterOff, FrozenCopy
from rlhf_core.types import PackedBatch
from tests.rlhf_core.stages.supervised_runs import base_model

pytestmark = pytest.mark.parts

BATCH = pack([[5, 6, 7, 8], [9, 10, 11]], [[True] * 4, [True] * 3])


def logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
    found: Tensor = model(batch)[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    join_group(rank=0, size=1)
    return base_model(tmp_path_factory.mktemp("base")).folder


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_offloaded_copy_computes_the_same_and_leaves_the_device_after_each_call(
    folder: Path, zero_stage: Literal[0, 3]
) -> None:
    engine = EngineConfig(dtype="float32", zero_stage=zero_stage)
    kept, offloaded = FrozenCopy(folder, engine), FrozenCopy(folder, engine, offloaded=True)
    assert torch.equal(offloaded.forward([BATCH], logprobs)[0], kept.forward([BATCH], logprobs)[0])
    assert (offloaded.engine._offloaded is None, kept.engine._offloaded is None) == (False, True)
    for reference in (kept, offloaded):
        reference.offload()
        assert reference.engine._offloaded is not None
        reference.reload()
    assert (offloaded.engine._offloaded is None, kept.engine._offloaded is None) == (False, True)
    assert not any(p.requires_grad for p in kept.engine.module.parameters())


def test_with_the_adapter_off_the_policy_is_its_base(folder: Path) -> None:
    engine = EngineConfig(dtype="float32", zero_stage=0)
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    policy = DeepSpeedEngine(
        PolicyModel(model), engine=engine, optimizer=OptimizerConfig(learning_rate=1e-3), total_steps=1
    )
    before = policy.forward([BATCH], logprobs)[0]
    base = FrozenCopy(folder, engine).forward([BATCH], logprobs)[0]
    torch.testing.assert_close(AdapterOff(policy).forward([BATCH], logprobs)[0], base, atol=1e-6, rtol=0)
    assert torch.equal(policy.forward([BATCH], logprobs)[0], before), "the adapter is on again"
    assert float((before - base).abs().max()) > 1e-3
