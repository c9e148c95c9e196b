"""A model whose layers are compiled."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.small_models import small_config, small_model
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.errors import StageError
from rlhf_core.models.compiling import compile_layers
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, build, loss, tiny_model
from tests.rlhf_core.training.tiny_engine import batch as tiny_batch

pytestmark = pytest.mark.endurance("architectures")

CPU = torch.device("cpu")


def group(prompt: int, completions: int) -> PackedBatch:
    """Completions with one prompt."""
    sequences = [[*range(prompt), *(1 + (i + j) % 20 for j in range(3 + i))] for i in range(completions)]
    return pack(sequences, [[place >= prompt for place in range(len(ids))] for ids in sequences])


BATCHES = [group(17, 3), group(20, 6), group(18, 2)]


def gradient(policy: PolicyModel) -> Tensor:
    policy.zero_grad()
    for batch in BATCHES:
        policy(batch, only=batch.loss_mask)[0].sum().backward()
    return torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None])


@pytest.mark.endurance("architectures")
@pytest.mark.slow("torch compiles layers")
def test_compiled_layers_compute_what_plain_ones_do_with_gradients_and_without() -> None:
    plain = PolicyModel(small_model(small_config("llama"), dtype=torch.bfloat16))
    compiled = copy.deepcopy(plain)
    plain.check_layouts(CPU)
    compiled.check_layouts(CPU, compiled=True)
    assert compiled.shares_prompts
    graphs = 0
    for batch in BATCHES:
        with torch.no_grad():
            expected, scored = plain(batch)[0], compiled(batch)[0]
        torch.testing.assert_close(scored, expected, rtol=0.02, atol=0.02)
        assert torch.equal(compiled(batch)[0], scored), "the ratio of a policy to itself is 1"
        graphs = graphs or counters["stats"]["unique_graphs"]
    assert 0 < counters["stats"]["unique_graphs"] == graphs, "compiled again for another number of tokens"
    expected, found = gradient(plain), gradient(compiled)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.endurance("architectures")
@pytest.mark.slow("torch compiles layers")
def test_an_engine_trains_a_model_with_compiled_layers(tmp_path: Path) -> None:
    found, folder = [], tiny_model(tmp_path)
    for with_compiled in (False, True):
        engine = build(folder, optimizer=OPTIMIZER, zero_stage=2, compiled=with_compiled)
        steps = [engine.step([tiny_batch()], loss) for _ in range(3)]
        found.append([(step.means["loss"], step.gradient_norm) for step in steps])
    for plain, compiled in zip(*found, strict=True):
        assert compiled == pytest.approx(plain, rel=1e-5)


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="compiled layers cannot have their weights gathered, which zero_stage 3 does"):
        EngineConfig(compiled=True, zero_stage=3)
    with pytest.raises(StageError, match=r"^MixtralForCausalLM has experts, whose layers are not compiled; leave"):
        compile_layers(small_model(small_config("mixtral")))
