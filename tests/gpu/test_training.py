"""One rank under DeepSpeed at each ZeRO stage and with each offload, against optimizers in float64 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.muon import orthogonalize
from rlhf_core.training.state import RankState
from tests.gpu import float64
from tests.rlhf_core.training.muon_reference import reference_steps
from tests.rlhf_core.training.tiny_engine import MUON, OPTIMIZER, TOKENS, batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.endurance("benchmarks")

SETTINGS: list[dict[str, Any]] = [
    {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3},
    {"zero_stage": 1, "offload_optimizer": True}, {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True}, {"zero_stage": 3, "offload_parameters": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
]  # fmt: skip
EACH = pytest.mark.parametrize("settings", SETTINGS, ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@EACH
def test_steps_of_adamw_are_those_of_float64(folder: Path, settings: dict[str, Any]) -> None:
    before, after, norms = float64.adamw_steps(folder, batch(), OPTIMIZER, tokens=TOKENS, steps=3, total=4)
    engine = build(folder, **settings)
    found = [engine.step([batch()], loss).gradient_norm for _ in range(3)]
    assert found == pytest.approx(norms, rel=1e-4)
    weights = weights_of(engine)
    changes = {name: weights[name].double() - before[name] for name in after}
    assert float64.relative_error(changes, {name: after[name] - before[name] for name in after}) < 1e-3


@EACH
def test_steps_in_bfloat16_keep_float32_masters(folder: Path, settings: dict[str, Any]) -> None:
    """Weights are rounded once and activations everywhere; what is summed up is not."""
    before, after, norms = float64.adamw_steps(folder, batch(), OPTIMIZER, tokens=TOKENS, steps=3, total=4)
    engine = build(folder, dtype="bfloat16", **settings)
    found = [engine.step([batch()], loss).gradient_norm for _ in range(3)]
    assert found == pytest.approx(norms, rel=0.03)
    masters = dict(engine.master_weights())
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    changes = {name: masters[name].cpu().double() - before[name] for name in after}
    assert float64.relative_error(changes, {name: after[name] - before[name] for name in after}) < 0.3


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_steps_of_muon_are_those_of_float64(folder: Path, settings: dict[str, Any]) -> None:
    expected = reference_steps(folder, 3)
    engine = build(folder, optimizer=MUON, **settings)
    for _ in range(3):
        engine.step([batch()], loss)
    weights = weights_of(engine)
    assert float64.relative_error(weights, expected) < 1e-4


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (96, 40), (40, 96)], ids=str)
def test_muon_makes_a_matrix_as_orthogonal_as_float64_does(
    shape: tuple[int, int], dtype: torch.dtype, most: float, device: torch.device
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = orthogonalize(matrix, 5, torch.float64)
    found = orthogonalize(matrix.to(device, torch.float32), 5, dtype).cpu()
    assert (found - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("settings", [each for each in SETTINGS if "offload_parameters" not in each], ids=str)
def test_a_device_that_was_lent_between_steps_changes_nothing(
    folder: Path, settings: dict[str, Any], lora: LoraConfig | None, device: torch.device
) -> None:
    results = []
    for lends in (False, True):
        torch.manual_seed(0)
        engine = build(folder, lora=lora, **settings)
        for _ in range(3):
            engine.step([batch()], loss)
            if lends:
                engine.offload()
                assert device.type == "cpu" or not on_device(engine)
                engine.reload()
        results.append(weights_of(engine))
    plain, lent = results
    if device.type == "cpu":
        assert all(torch.equal(lent[name], plain[name]) for name in plain)
    else:  # where sums are in the order in which threads end
        assert float64.relative_error(lent, plain) < 1e-5


def on_device(engine: DeepSpeedEngine) -> list[str]:
    """Which tensors of its state are there; a fused optimizer's counters of steps are no memory."""
    state = engine.state()
    return [name for name, tensor in {**state.shared, **state.own}.items() if tensor.is_cuda and tensor.ndim]


@pytest.mark.parametrize("optimizer", [OPTIMIZER, MUON], ids=["adamw", "muon"])
@EACH
def test_an_engine_that_resumes_takes_the_same_steps(
    folder: Path, settings: dict[str, Any], optimizer: OptimizerConfig, device: torch.device
) -> None:
    first, resumed = (build(folder, optimizer=optimizer, dtype="bfloat16", **settings) for _ in range(2))
    for _ in range(2):
        first.step([batch()], loss)
    state = first.state()
    saved = RankState(*({n: t.detach().cpu().clone() for n, t in part.items()} for part in (state.shared, state.own)))
    resumed.load_state(saved)
    for engine in (first, resumed):
        engine.step([batch()], loss)
    expected, found = (dict(engine.master_weights()) for engine in (first, resumed))
    assert float64.relative_error(found, expected) <= (0 if device.type == "cpu" else 1e-5)
