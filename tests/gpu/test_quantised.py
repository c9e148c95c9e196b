"""A base in 4 bits computes with the dequantised values that its folder has, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.base import Dtype
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.quantisation import write_rounded
from rlhf_core.types import PackedBatch
from tests.gpu import float64
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.endurance("benchmarks")

LORA = LoraConfig(rank=2)
MOST: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 3e-2}  # on a GPU, whose kernels may multiply otherwise


def logprobs(model: nn.Module, part: PackedBatch) -> Tensor:
    computed: Tensor = model(part)[0]
    return computed


@pytest.mark.parametrize("dtype", MOST)
def test_log_probs_and_steps_are_those_of_the_dequantised_folder(
    tmp_path: Path, dtype: Dtype, device: torch.device
) -> None:
    write_rounded(tiny_model(tmp_path / "original"), tmp_path / "base", dtype)
    results = []
    for lora in (LORA, LORA.model_copy(update={"quantised": "nf4"})):
        torch.manual_seed(0)
        engine = build(tmp_path / "base", lora=lora, dtype=dtype)
        before = engine.forward([batch()], logprobs)[0].cpu()
        for _ in range(2):
            engine.step([batch()], loss)
        results.append((before, engine.forward([batch()], logprobs)[0].cpu(), weights_of(engine)))
    plain, packed = results
    assert not torch.equal(plain[0], plain[1])
    if device.type == "cpu":
        assert torch.equal(packed[0], plain[0])
        assert torch.equal(packed[1], plain[1])
        assert all(torch.equal(packed[2][name], plain[2][name]) for name in plain[2])
        return
    for found, expected in zip(packed[:2], plain[:2], strict=True):
        assert (found - expected).abs().max() < MOST[dtype] * expected.abs().max()
    assert float64.relative_error(packed[2], plain[2]) < 10 * MOST[dtype]
