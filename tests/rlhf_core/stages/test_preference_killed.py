"""Preference learning that is killed and run again ends, to the bit, where it would have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.preference import PreferenceConfig
from rlhf_core.contract import Input
from rlhf_core.stages import preference
from tests.rlhf_core.stages.killed_runs import require_resumed
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, dataset, pairs

FULL = PreferenceConfig.model_validate({
    "dataset": "d", "batch_size": 7, "epochs": 2, "max_length": 32, "optimizer": OPTIMIZER, "engine": ENGINE,
    "log_every": 3, "checkpoint": {"every_steps": 2}, "losses": {"dpo": {"type": "dpo"}, "nll": {"type": "nll"}},
})  # fmt: skip
ADAPTER = PreferenceConfig.model_validate({
    **FULL.model_dump(mode="json", exclude_unset=True), "lora": {"rank": 4, "dropout": 0.2}, "dropout": True,
    "validation": {"dataset": "v", "every_steps": 3},
})  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "data", pairs(30)),
        "validation.dataset": dataset(folder / "held_out", pairs(36)[30:]),
    }  # fmt: skip


@pytest.mark.parametrize(("config", "weights"), [(FULL, "model"), (ADAPTER, "adapter_model")], ids=["full", "adapter"])
def test_a_killed_run_ends_as_if_it_had_not_been(
    inputs: dict[str, Input], tmp_path: Path, config: PreferenceConfig, weights: str
) -> None:
    results = (f"work/model/{weights}.safetensors", "shared.safetensors", "own.safetensors")
    require_resumed(preference.run, config, inputs, tmp_path, *results)
