"""A reward model whose training is killed and run again is, to the bit, the one it would have been, and as sure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.checkpoint import CheckpointConfig
from rlhf_core.config.stages import RewardModelConfig
from rlhf_core.contract import Input
from rlhf_core.stages import reward_model
from tests.rlhf_core.stages.killed_runs import HeldContext, KeptCluster, finish, kill_when_held, start, without_times
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, dataset, pairs

CONFIG = RewardModelConfig(
    dataset="d", batch_size=7, epochs=2, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=1,
    checkpoint=CheckpointConfig(every_steps=2),
)  # fmt: skip
Inputs = dict[str, Input]


def run(folder: Path, inputs: Inputs, moment: str) -> None:
    """One attempt, in a process of its own."""
    context = HeldContext(folder, inputs, moment)
    output = reward_model.run(CONFIG, inputs, context, KeptCluster(folder))
    result = [dict(without_times(output.metrics)), [(step, without_times(line)) for step, line in context.logs]]
    (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", pairs(30))}


def results(folder: Path) -> dict[str, bytes]:
    names = ("work/reward_model/model.safetensors", "work/reward_model/config.json", "shared.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def test_a_killed_run_ends_as_if_it_had_not_been(inputs: Inputs, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    finish(start(run, whole, inputs, ""))
    kill_when_held(start(run, killed, inputs, "after the manifest"), killed)
    assert Checkpoints(LocalStore(killed / "store"), HeldContext.REF).newest_step() == 4
    finish(start(run, killed, inputs, ""))
    assert results(killed) == results(whole)
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (killed, whole))
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
