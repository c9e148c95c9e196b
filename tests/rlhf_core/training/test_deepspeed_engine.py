"""DeepSpeed on one rank, beside tests/contracts; two are in tests/rlhf_core/actors/test_training_ranks.py."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.packing import select
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.metrics import StepMetrics, over_steps
from rlhf_core.types import PackedBatch
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, TOKENS, batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def logprobs(model: nn.Module, part: PackedBatch) -> Tensor:
    result: Tensor = model(part)[0]
    return result


def weights_after(
    engine: DeepSpeedEngine, parts: list[PackedBatch], steps: int = 2
) -> tuple[list[StepMetrics], dict[str, Tensor]]:
    metrics = [engine.step(parts, loss) for _ in range(steps)]
    return metrics, weights_of(engine)


def one_by_one() -> list[PackedBatch]:
    return [select(batch(), [i]) for i in range(4)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_update_is_the_same_at_each_stage(folder: Path, stage: int) -> None:
    expected_metrics, expected = weights_after(build(folder, zero_stage=0), [batch()])
    halves = [select(batch(), [2, 0]), select(batch(), [3, 1])]
    metrics, weights = weights_after(build(folder, zero_stage=stage), halves)
    assert [m.means["tokens"] for m in metrics] == [TOKENS, TOKENS]
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        assert over_steps([got]) == pytest.approx(over_steps([wanted]), rel=1e-5)
    for name, wanted_weight in expected.items():
        torch.testing.assert_close(weights[name], wanted_weight, rtol=1e-5, atol=1e-5)


def test_what_a_warm_process_has_frozen_stays_frozen(folder: Path) -> None:
    """The tests' process freezes what it has loaded, as a warm one does."""
    before = gc.get_freeze_count()
    engine = build(folder, zero_stage=2)
    engine.offload()
    engine.reload()
    assert gc.get_freeze_count() > before / 2 > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_may_have_an_odd_number_of_parameters(folder: Path, stage: int) -> None:
    """DeepSpeed refuses buckets of an odd size."""
    model = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa"))
    model.odd = nn.Parameter(torch.zeros(1 + sum(p.numel() for p in model.parameters()) % 2))
    engine = DeepSpeedEngine(model, engine=EngineConfig(dtype="float32", zero_stage=stage), optimizer=OPTIMIZER,
                             total_steps=1)  # fmt: skip
    assert engine.step([batch()], loss).gradient_norm > 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bfloat16_keeps_float32_masters_and_gradient_sums(folder: Path, stage: int) -> None:
    engine = build(folder, zero_stage=stage, dtype="bfloat16")
    before = weights_of(engine)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    exact, _ = weights_after(build(folder, zero_stage=0), [batch()], steps=1)
    metrics, _ = weights_after(engine, one_by_one(), steps=1)
    assert metrics[0].gradient_norm == pytest.approx(exact[0].gradient_norm, rel=0.02)
    sharded = engine._engine.optimizer
    masters = sharded.fp32_partitioned_groups_flat if stage == 3 else sharded.single_partition_of_fp32_groups
    assert masters
    assert {p.dtype for p in masters} == {torch.float32}
    rotary = [b for name, b in engine.module.named_buffers() if name.endswith("inv_freq")]
    assert rotary
    assert {b.dtype for b in rotary} == {torch.float32}


def test_small_bfloat16_updates_are_not_lost(folder: Path) -> None:
    """One update of 1e-5 vanishes in a bfloat16 weight of 0.1; forty of them must not."""
    engine = DeepSpeedEngine(
        PolicyModel(load_causal_model(folder, dtype=torch.bfloat16, attention="sdpa")),
        engine=EngineConfig(dtype="bfloat16", zero_stage=2),
        optimizer=OptimizerConfig(learning_rate=1e-5, schedule="constant", warmup_share=0.0),
        total_steps=1,
    )
    before, first = weights_of(engine), weights_after(engine, [batch()], steps=1)[1]
    after = weights_after(engine, [batch()], steps=40)[1]
    name = "model.layers.0.mlp.up_proj.weight"
    changed_once = (first[name] != before[name]).float().mean()
    changed = (after[name] != before[name]).float().mean()
    assert changed > changed_once + 0.2


def test_the_rate_follows_the_schedule_and_the_norm_is_that_before_clipping(folder: Path) -> None:
    engine = build(folder, zero_stage=2)
    metrics = [engine.step([batch()], loss) for _ in range(4)]
    assert [m.learning_rate for m in metrics] == pytest.approx([0.005, 0.01, 0.01, 0.0])
    assert engine.counters.steps == 4
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa")
    loss(PolicyModel(model), batch())[0].backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    assert metrics[0].gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert metrics[0].gradient_norm > OPTIMIZER.max_gradient_norm


def test_a_forward_is_that_of_the_model(folder: Path) -> None:
    plain = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa"))
    for optimizer in (OPTIMIZER, None):
        engine = build(folder, zero_stage=2, optimizer=optimizer)
        first, second = engine.forward([batch(), select(batch(), [1])], logprobs)
        torch.testing.assert_close(first, plain(batch())[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(second, plain(select(batch(), [1]))[0], rtol=0, atol=1e-5)


def test_a_frozen_engine_takes_no_step(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="built without an optimizer"):
        build(folder, optimizer=None).step([batch()], loss)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ],
    ids=str,
)
def test_offloading_in_bfloat16_takes_the_same_steps(folder: Path, settings: dict[str, Any]) -> None:
    expected_metrics, expected = weights_after(build(folder, dtype="bfloat16", zero_stage=2), one_by_one(), steps=3)
    metrics, weights = weights_after(build(folder, dtype="bfloat16", **settings), one_by_one(), steps=3)
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        assert over_steps([got]) == pytest.approx(over_steps([wanted]), rel=1e-2)
    for name, wanted_weight in expected.items():
        assert weights[name].dtype == torch.bfloat16
        torch.testing.assert_close(weights[name], wanted_weight, rtol=1e-2, atol=1e-3)


def test_a_reference_in_main_memory_says_the_same(folder: Path) -> None:
    plain = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa"))
    frozen = build(folder, optimizer=None, zero_stage=3, offload_parameters=True)
    torch.testing.assert_close(frozen.forward([batch()], logprobs)[0], plain(batch())[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_adapter_alone_is_in_the_state(folder: Path, stage: int) -> None:
    engine = build(folder, lora=LoraConfig(rank=2), zero_stage=stage)
    metrics, state = weights_after(engine, [batch()])
    assert metrics[1].means["loss"] < metrics[0].means["loss"]
    assert len(state) == 2 * 2 * 7
    assert state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (2, 16)
    assert state["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].abs().max() > 0


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.endurance("architectures"))])
def test_with_the_adapter_off_it_is_the_base(folder: Path, stage: int) -> None:
    plain = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa"))
    engine = build(folder, lora=LoraConfig(rank=2), zero_stage=stage)
    weights_after(engine, [batch()])
    with engine.module.model.disable_adapter():
        off = engine.forward([batch()], logprobs)[0]
    torch.testing.assert_close(off, plain(batch())[0], rtol=0, atol=1e-5)
    assert (engine.forward([batch()], logprobs)[0] - off).abs().max() > 1e-3
    assert engine.step([batch()], loss).gradient_norm > 0


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.endurance("architectures"))])
def test_a_scalar_model_trains_its_head_and_its_backbone(folder: Path, stage: int) -> None:
    engine = DeepSpeedEngine(
        ScalarModel(load_scalar_model(folder, dtype=torch.float32, attention="sdpa")),
        engine=EngineConfig(dtype="float32", zero_stage=stage), optimizer=OPTIMIZER, total_steps=4,
    )  # fmt: skip
    before = weights_of(engine)

    def squares(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        value = ((model(part) - 1) ** 2).sum() / part.num_tokens
        return value, {"loss": Sum(value)}

    losses = [engine.step([batch()], squares).means["loss"] for _ in range(3)]
    after = weights_of(engine)
    assert losses[2] < losses[0]
    assert "score.weight" in after
    assert all(not torch.equal(after[name], before[name]) for name in before)
