"""What a recipe may ask of an optimizer and an engine, and what of it is part of a stage key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.stages import SFTConfig
from rlhf_core.config.training import OptimizerConfig

MUON = {"name": "muon", "learning_rate": 1e-3}


def sft(optimizer: dict[str, Any], engine: dict[str, Any]) -> SFTConfig:
    return SFTConfig.model_validate(
        {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": optimizer, "engine": engine}
    )


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (
            {"dtype": "float32", "zero_stage": 0, "offload_optimizer": True},
            "offload_optimizer needs zero_stage 1, 2 or 3",
        ),
        ({"zero_stage": 2, "offload_parameters": True}, "offload_parameters needs zero_stage 3"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        EngineConfig.model_validate(engine)


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ({"dtype": "float32", "zero_stage": 0}, 0), ({"dtype": "float32", "zero_stage": 1}, 1),
        ({"zero_stage": 0, "offload_optimizer": True}, 2), ({"zero_stage": 1}, 2), ({"zero_stage": 3}, 3),
    ],
)  # fmt: skip
def test_bfloat16_is_sharded_at_least_as_stage_2(engine: dict[str, Any], stage: int) -> None:
    assert EngineConfig.model_validate(engine).sharding == stage


def test_muon_in_main_memory_is_refused() -> None:
    assert sft(MUON, {"zero_stage": 3}).optimizer.name == "muon"
    with pytest.raises(ValidationError, match=r"optimizer\.name muon does not work with engine\.offload_optimizer"):
        sft(MUON, {"offload_optimizer": True})


def test_settings_of_an_optimizer_that_is_not_used_are_refused() -> None:
    with pytest.raises(ValidationError, match="there is a block `muon`, but the optimizer is adamw; set `name: muon`"):
        OptimizerConfig.model_validate({"learning_rate": 1.0, "muon": {"ns_steps": 3}})


def test_muons_settings_are_part_of_its_keys_alone() -> None:
    adamw = result_settings(OptimizerConfig(learning_rate=1.0))
    assert "muon" not in adamw
    assert "max_skipped_updates" not in adamw
    muon = OptimizerConfig.model_validate({"name": "muon", "learning_rate": 1.0, "muon": {"ns_steps": 3}})
    assert result_settings(muon)["muon"]["ns_steps"] == 3


@pytest.mark.parametrize(
    "settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"ns_steps": 0}, {"scale": "rms"}], ids=str
)
def test_muons_settings_have_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig.model_validate({"name": "muon", "learning_rate": 1.0, "muon": settings})
