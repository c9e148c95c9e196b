"""Preference learning that is killed and run again ends, to the bit, where it would have ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.preference import PreferenceConfig
from rlhf_core.contract import Input
from rlhf_core.stages import preference
from tests.rlhf_core.stages.killed_runs import HeldContext, KeptCluster, finish, kill_when_held, start, without_times
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, dataset, pairs

FULL = PreferenceConfig.model_validate({
    "dataset": "d", "batch_size": 7, "epochs": 2, "max_length": 32, "optimizer": OPTIMIZER, "engine": ENGINE,
    "log_every": 3, "checkpoint": {"every_steps": 2}, "losses": {"dpo": {"type": "dpo"}, "nll": {"type": "nll"}},
})  # fmt: skip
ADAPTER = PreferenceConfig.model_validate({
    **FULL.model_dump(mode="json", exclude_unset=True), "lora": {"rank": 4, "dropout": 0.2}, "dropout": True,
    "validation": {"dataset": "v", "every_steps": 3},
})  # fmt: skip
Inputs = dict[str, Input]


def run(folder: Path, inputs: Inputs, config: PreferenceConfig, moment: str) -> None:
    """One attempt, in a process of its own."""
    context = HeldContext(folder, inputs, moment)
    output = preference.run(config, inputs, context, KeptCluster(folder))
    result = [dict(without_times(output.metrics)), [(step, without_times(line)) for step, line in context.logs]]
    (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "data", pairs(30)),
        "validation.dataset": dataset(folder / "held_out", pairs(36)[30:]),
    }  # fmt: skip


@pytest.mark.parametrize(("config", "weights"), [(FULL, "model"), (ADAPTER, "adapter_model")], ids=["full", "adapter"])
def test_a_killed_run_ends_as_if_it_had_not_been(
    inputs: Inputs, tmp_path: Path, config: PreferenceConfig, weights: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    finish(start(run, whole, inputs, config, ""))
    kill_when_held(start(run, killed, inputs, config, "after the manifest"), killed)
    assert Checkpoints(LocalStore(killed / "store"), HeldContext.REF).newest_step() == 4
    finish(start(run, killed, inputs, config, ""))
    for name in (f"work/model/{weights}.safetensors", "shared.safetensors", "own.safetensors", "result.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
