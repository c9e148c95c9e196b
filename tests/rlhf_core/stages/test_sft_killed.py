"""SFT killed at any moment and run again ends, to the bit, where it would have ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Input
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.stages import sft
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.testing.stage import without_times
from rlhf_core.training import snapshots
from rlhf_core.training.group import InlineGroup
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


class Worker(LanguageModelWorker):
    """Holds in the middle of step 4, between its two micro-batches, if `folder` is given."""

    def __init__(self, folder: Path | None, *args: Any) -> None:
        super().__init__(*args)
        self._folder = folder

    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        if self._folder and self.engine.counters.steps == 3 and batch is not shard.micro_batches[0]:
            hold(self._folder)
        return super().loss(model, batch, shard, step_routing)


def run(folder: Path, inputs: Inputs, config: SFTConfig, moment: str) -> None:
    """One attempt, in a process of its own."""
    if moment == "half a file is written":
        snapshots.save_file = partial(_save_half, folder, snapshots.save_file)

    class Cluster(KeptCluster):
        def workers(
            self, placement: Placement, factory: Callable[..., Any], /, *args: Any
        ) -> AbstractContextManager[InlineGroup[Any]]:
            return super().workers(placement, Worker, folder if moment == "the middle of a step" else None, *args)

    context = HeldContext(folder, inputs, moment)
    sft.run(config, inputs, context, Cluster(folder))
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
    finish(
        start(run, folder, inputs, CONFIG.model_copy(update={"checkpoint": CheckpointConfig(every_minutes=None)}), "")
    )
    assert not (folder / "store").exists()
    assert [step for step, _ in json.loads((folder / "logs.json").read_text())] == [3, 6, 9]
    return results(folder)


@pytest.mark.parametrize(
    ("moment", "resumed_after"),
    [
        ("the middle of a step", 2),
        ("half a file is written", 0),
        ("before the manifest", 2),
        ("after the manifest", 4),
    ],
)
@pytest.mark.slow("runs that are killed at each moment")
def test_a_killed_run_ends_as_if_it_had_not_been(
    inputs: Inputs, expected: dict[str, bytes], tmp_path: Path, moment: str, resumed_after: int
) -> None:
    kill_when_held(start(run, tmp_path, inputs, CONFIG, moment), tmp_path)
    assert (Checkpoints(LocalStore(tmp_path / "store"), HeldContext.REF).newest_step() or 0) == resumed_after
    finish(start(run, tmp_path, inputs, CONFIG, ""))
    assert results(tmp_path) == expected
