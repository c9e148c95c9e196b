"""SFT killed while it writes a checkpoint, and run again, ends to the bit where it would have ended.

tests/contracts stops each stage behind a checkpoint, and test_sft_ranks.py kills in a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Input
from rlhf_core.stages import sft
from rlhf_core.testing.stage import without_times
from rlhf_core.training import snapshots
from tests.rlhf_core.stages.killed_runs import (
    HeldContext,
    KeptCluster,
    finish,
    hold,
    kill_when_held,
    start,
)
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, conversations, dataset

pytestmark = pytest.mark.parts

CONFIG = SFTConfig(
    dataset="d", batch_size=7, epochs=3, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=3,
    lora=LoraConfig(rank=4, dropout=0.2),  # random numbers in every forward, and frozen weights
    checkpoint=CheckpointConfig(every_steps=2),
)  # fmt: skip
Inputs = dict[str, Input]


def run(folder: Path, inputs: Inputs, config: SFTConfig, half: bool = False) -> None:
    """One attempt, in a process of its own. half: it holds when half of a file of its checkpoint is written."""
    if half:
        snapshots.save_file = partial(_save_half, folder, snapshots.save_file)
    context = HeldContext(folder, inputs, "")
    sft.run(config, inputs, context, KeptCluster(folder))
    (folder / "logs.json").write_text(json.dumps([(step, without_times(line)) for step, line in context.logs]))


def _save_half(folder: Path, save_file: Callable[..., None], tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    if "shared" in path.name and any("exp_avg" in name for name in tensors) and (folder / "store").exists():
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        hold(folder)
        path.write_bytes(content)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", conversations(20))}


def results(folder: Path) -> dict[str, bytes]:
    names = ("work/model/adapter_model.safetensors", "shared.safetensors", "own.safetensors", "logs.json")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def expected(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of a run that is never killed, and that keeps nothing."""
    folder = tmp_path_factory.mktemp("whole")
    kept = CheckpointConfig(every_minutes=None)
    finish(start(run, folder, inputs, CONFIG.model_copy(update={"checkpoint": kept})))
    assert not (folder / "store").exists()
    assert [step for step, _ in json.loads((folder / "logs.json").read_text())] == [3, 6, 9]
    return results(folder)


@pytest.mark.slow("a run that is killed, and one that is not")
def test_a_killed_run_ends_as_if_it_had_not_been(inputs: Inputs, expected: dict[str, bytes], tmp_path: Path) -> None:
    kill_when_held(start(run, tmp_path, inputs, CONFIG, True), tmp_path)
    assert Checkpoints(LocalStore(tmp_path / "store"), HeldContext.REF).newest_step() is None
    finish(start(run, tmp_path, inputs, CONFIG))
    assert results(tmp_path) == expected
