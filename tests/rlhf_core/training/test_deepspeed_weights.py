"""Whole weights out of an engine, and other weights in their place, at every way of sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.parts

# In float32 the contract of a training engine has ZeRO 0, 2 and 3.
SETTINGS = [{"zero_stage": 1}, {"zero_stage": 2, "dtype": "bfloat16"}, {"zero_stage": 3, "dtype": "bfloat16"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def logprobs(engine: DeepSpeedEngine) -> Tensor:
    return engine.forward([batch()], lambda model, b: model(b)[0])[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_master_weights_are_what_the_weights_are_rounded_from(folder: Path, settings: dict[str, object]) -> None:
    engine = build(folder, **settings)
    engine.step([batch()], loss)
    masters = {name: master.clone() for name, master in engine.master_weights()}
    live = weights_of(engine)
    assert masters.keys() == live.keys()
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert all(torch.equal(masters[name].to(live[name].dtype), live[name]) for name in live)
    if settings.get("dtype") == "bfloat16":
        assert any(not torch.equal(masters[name], live[name].float()) for name in live)


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_others_in_their_place_and_back(folder: Path, settings: dict[str, object]) -> None:
    engine, other, never = (build(folder, **settings) for _ in range(3))
    for trained in (engine, never):
        trained.step([batch()], loss)
    for _ in range(2):
        other.step([batch()], loss)
    wanted = {name: master.clone() for name, master in other.master_weights()}
    before, own = weights_of(engine), logprobs(engine)
    with engine.replaced(wanted.items()):
        inside = weights_of(engine)
        assert torch.equal(logprobs(engine), logprobs(other))
    assert all(torch.equal(inside[name], weights_of(other)[name]) for name in inside)
    assert all(torch.equal(before[name], weights_of(engine)[name]) for name in before)
    assert torch.equal(logprobs(engine), own)
    assert engine.step([batch()], loss) == never.step([batch()], loss)
    assert all(torch.equal(weights_of(never)[name], weights_of(engine)[name]) for name in before)


def test_of_a_lora_model_only_the_adapter(folder: Path) -> None:
    engine = build(folder, zero_stage=2, lora=LoraConfig(rank=2))
    names = [name for name, _ in engine.master_weights()]
    assert len(names) == len(weights_of(engine))
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    with engine.replaced([(name, torch.full_like(master, 0.5)) for name, master in engine.master_weights()]):
        assert all(bool((tensor == 0.5).all()) for tensor in weights_of(engine).values())
