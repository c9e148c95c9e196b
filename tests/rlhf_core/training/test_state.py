"""An engine that is restored goes on to the bit as the one that was kept, in cases beside those of its contract.

Two ranks: tests/rlhf_core/stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from rlhf_core.config.base import Dtype
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.models.quantisation import write_rounded
from rlhf_core.packing import select
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.state import RankState
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, batch, build, loss, tiny_model

pytestmark = pytest.mark.parts

PARTS = [select(batch(), [0, 1]), select(batch(), [2, 3])]
MUON = OptimizerConfig(name="muon", learning_rate=0.01)
LORA = LoraConfig(rank=2, alpha=4.0)
DORA = LoraConfig(rank=2, dora=True, rank_stabilised=True, modules_to_save=("norm",))

QLORA = LORA.model_copy(update={"quantised": "nf4"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def kept(engine: DeepSpeedEngine) -> RankState:
    """The state, through bytes."""
    state = engine.state()
    return RankState(*(load(save({n: t.contiguous() for n, t in part.items()})) for part in (state.shared, state.own)))


def steps(engine: DeepSpeedEngine, count: int) -> tuple[list[StepMetrics], dict[str, Tensor]]:
    metrics = [engine.step(PARTS, loss) for _ in range(count)]
    state = kept(engine)
    return metrics, {**state.shared, **state.own}


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer", "lora"),
    [
        (0, "float32", MUON, None),
        (1, "float32", OPTIMIZER, LORA),
        (2, "bfloat16", OPTIMIZER, DORA),
        (2, "bfloat16", OPTIMIZER, QLORA),
        pytest.param(3, "float32", MUON, None, marks=pytest.mark.endurance("architectures")),
        pytest.param(3, "bfloat16", OPTIMIZER, None, marks=pytest.mark.endurance("architectures")),
    ],
)
@pytest.mark.slow("trains under DeepSpeed three times")
def test_restored_equals_kept(
    folder: Path, tmp_path: Path, stage: int, dtype: Dtype, optimizer: OptimizerConfig, lora: LoraConfig | None
) -> None:
    if lora is not None and lora.quantised:
        write_rounded(folder, tmp_path, dtype)
        folder = tmp_path

    def engine() -> DeepSpeedEngine:
        torch.manual_seed(0)  # of the adapter's matrices
        return build(folder, optimizer=optimizer, lora=lora, zero_stage=stage, dtype=dtype)

    first = engine()
    steps(first, 2)
    state = kept(first)
    metrics, expected = steps(first, 2)
    fresh, used = engine(), first
    for restored in (fresh, used):
        restored.load_state(state)
        assert restored.counters.steps == 2
        again, found = steps(restored, 2)
        assert again == metrics
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = {**state.shared, **state.own}
    if lora is not None:
        assert not any("base_layer" in name for name in names)  # frozen weights are no state
    assert any(name.startswith("optimizer.") for name in names)


def test_what_is_shared_by_the_ranks_is_told(folder: Path) -> None:
    for stage, shared, own in ((0, {"weight", "optimizer", "counters"}, set()),
                               (2, {"weight", "counters"}, {"master", "optimizer"}),
                               (3, {"counters"}, {"weight", "master", "optimizer"})):  # fmt: skip
        engine = build(folder, zero_stage=stage)
        engine.step(PARTS, loss)
        state = engine.state()
        assert {name.split(".")[0] for name in state.shared} == shared
        assert {name.split(".")[0] for name in state.own} == own


def test_what_does_not_fit_is_named(folder: Path) -> None:
    engine = build(folder, zero_stage=0)
    engine.step(PARTS, loss)
    before = kept(engine)
    missing = RankState({n: t for n, t in before.shared.items() if not n.endswith("norm.weight")})
    with pytest.raises(
        StageError, match=r"norm.weight` is in this run, but not in the checkpoint: .*checkpoint.resume"
    ):
        build(folder, zero_stage=0).load_state(missing)
    name = next(name for name in before.shared if name.startswith("weight."))
    other = RankState(before.shared | {name: torch.zeros(2, 2)})
    with pytest.raises(StageError, match=rf"`{name}` is torch.float32 \(2, 2\) in the checkpoint"):
        build(folder, zero_stage=0).load_state(other)
