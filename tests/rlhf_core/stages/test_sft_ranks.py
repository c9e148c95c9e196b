"""SFT as a job on two ranks under ZeRO 3: trains as one rank does; killed, its ranks go too, and the next resumes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from ray.cloudpickle import register_pickle_by_value
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.packing import pack
from rlhf_core.stages import sft
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.testing.stage import without_times
from tests.rlhf_core.stages import context as stage_context
from tests.rlhf_core.stages import killed_runs
from tests.rlhf_core.stages.killed_runs import HeldContext, finish, hold, kill_when_held, start
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
)

pytestmark = pytest.mark.endurance("chaos")

CONFIG = SFTConfig(
    # Each line waits for the last checkpoint, without which one that is due is left out.
    dataset="d", batch_size=7, epochs=2, max_length=32, optimizer=OPTIMIZER, log_every=1,
    engine=ENGINE.model_copy(update={"zero_stage": 3}), checkpoint=CheckpointConfig(every_steps=1),
    placement=Placement(workers=2, cpus_per_worker=0.5, threads=1),
)  # fmt: skip


class Worker(LanguageModelWorker):
    """Rank 1 holds in the middle of step 4, while rank 0 waits for it, where `folder` is given."""

    def __init__(self, folder: Path | None, *args: Any) -> None:
        super().__init__(*args)
        self._folder = folder

    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        if self._folder and dist.get_rank() == 1 and self.engine.counters.steps == 3:
            hold(self._folder)
        return super().loss(model, batch, shard, step_routing)

    def restore_state(self) -> None:
        # A step leaves small weights gathered on every rank: they must not stay what they were.
        batch = pack([[1, 2, 3]], [[False, True, True]])
        self.train([Shard([batch], num_tokens=2, num_examples=1)])
        super().restore_state()

    def leave_state(self, folder: Path) -> None:
        self.copy_state()
        for name, tensors in (("shared", self._copied.shared), ("own", self._copied.own)):
            save_file(tensors, folder / f"{name}{dist.get_rank()}.safetensors")


def run(folder: Path, inputs: dict[str, Input], moment: str, ray_address: str, workers: int = 2) -> None:
    """One attempt, in a process of its own: a job on the cluster of the tests."""
    os.environ["RAY_ADDRESS"] = ray_address
    for module in (stage_context, killed_runs, sys.modules[__name__]):
        register_pickle_by_value(module)  # the actors cannot import a test module

    class Cluster(RayCluster):
        @contextmanager
        def workers(
            self, placement: Placement, engine: EngineConfig, factory: Callable[..., Any], /, *args: Any
        ) -> Iterator[RayWorkerGroup[Any]]:
            held = folder if moment == "the middle of a step" else None
            with super().workers(placement, engine, Worker, held, *args) as group:
                yield group
                group.call(Worker.leave_state, folder)

    context = HeldContext(folder, inputs, moment)
    placement = CONFIG.placement.model_copy(update={"workers": workers})
    sft.run(CONFIG.model_copy(update={"placement": placement}), inputs, context, Cluster())
    (folder / "logs.json").write_text(json.dumps([(step, without_times(line)) for step, line in context.logs]))


def results(folder: Path) -> Mapping[str, bytes]:
    names = ("work/model/model", "shared0", "own0", "own1")
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in names} | {
        "logs": (folder / "logs.json").read_bytes()
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", conversations(20))}


@pytest.fixture(scope="module")
def whole(ray_cluster: None, inputs: dict[str, Input], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is never killed."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(run, folder, inputs, "", ray.get_runtime_context().gcs_address))
    return folder


def _require_near(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all((weights[name] - expected[name]).abs().max() < 1e-5 for name in weights)


def _require_near_metrics(logs: Sequence[Any], expected: Sequence[Any]) -> None:
    for (step, metrics), (expected_step, expected_metrics) in zip(logs, expected, strict=True):
        assert step == expected_step
        for name in ("loss", "gradient_norm", "tokens", "learning_rate"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4)


@pytest.mark.slow("jobs with two ranks")
def test_two_ranks_train_the_same_policy_as_one(inputs: dict[str, Input], whole: Path, tmp_path: Path) -> None:
    context = context_of(tmp_path, inputs)
    one = sft.run(CONFIG.model_copy(update={"engine": ENGINE}), inputs, context, inline)
    files = (whole / "work" / "model", one.folder, inputs["model"].folder)
    weights, expected, before = (load_file(folder / "model.safetensors") for folder in files)
    _require_near(weights, expected)
    assert all((expected[name] - before[name]).abs().max() > 1e-3 for name in before)
    _require_near_metrics(json.loads((whole / "logs.json").read_text()), context.logs)
    assert CONFIG.reserves().devices == 1.0


@pytest.mark.slow("jobs with two ranks")
def test_a_run_killed_twice_ends_as_if_it_had_not_been(inputs: dict[str, Input], whole: Path, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    step = 0
    for moment in ("the middle of a step", "rank 1 uploads"):
        kill_when_held(start(run, tmp_path, inputs, moment, address), tmp_path)
        (tmp_path / "held").unlink()
        resumes_after = Checkpoints(LocalStore(tmp_path / "store"), HeldContext.REF).newest_step()
        assert resumes_after is not None
        assert step < resumes_after < 6
        step = resumes_after
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU", 0.0) < 4.0:
            assert time.monotonic() < deadline, "the killed job's ranks live on"
            time.sleep(0.1)
    finish(start(run, tmp_path, inputs, "", address))
    assert results(tmp_path) == results(whole)


@pytest.mark.slow("jobs with two ranks")
def test_a_run_killed_on_two_ranks_goes_on_with_one(inputs: dict[str, Input], whole: Path, tmp_path: Path) -> None:
    """As it would have, but for rounding: the same rows in the same order, at the same rates."""
    address = ray.get_runtime_context().gcs_address
    kill_when_held(start(run, tmp_path, inputs, "the middle of a step", address), tmp_path)
    resumes_after = Checkpoints(LocalStore(tmp_path / "store"), HeldContext.REF).newest_step()
    assert resumes_after in (2, 3)  # that of step 3 may still have been on its way
    finish(start(run, tmp_path, inputs, "", address, 1))
    _require_near(*(load_file(folder / "work" / "model" / "model.safetensors") for folder in (tmp_path, whole)))
    logs, expected = (json.loads((folder / "logs.json").read_text()) for folder in (tmp_path, whole))
    assert logs[:resumes_after] == expected[:resumes_after]
    _require_near_metrics(logs, expected)
