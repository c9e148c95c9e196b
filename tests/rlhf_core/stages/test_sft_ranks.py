"""SFT as a job runs it: in Ray actors, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from ray.cloudpickle import register_pickle_by_value
from safetensors.torch import load_file

from rlhf_core.artifacts.manifest import file_digest
from rlhf_core.config.placement import Placement
from rlhf_core.config.stages import SFTConfig
from rlhf_core.stages import sft
from rlhf_core.stages.ray_cluster import RayCluster
from tests.rlhf_core.stages import context as stage_context
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")
register_pickle_by_value(stage_context)  # the actors cannot import a test module

CONFIG = SFTConfig(dataset="d", batch_size=7, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=2)


def _two_ranks(zero_stage: Literal[2, 3]) -> SFTConfig:
    engine = ENGINE.model_copy(update={"zero_stage": zero_stage})
    return CONFIG.model_copy(
        update={"engine": engine, "placement": Placement(workers=2, cpus_per_worker=0.5, threads=1)}
    )


def test_two_ranks_train_the_same_policy_as_one(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", conversations(20))}
    one = context_of(tmp_path / "one", inputs)
    expected = load_file(sft.run(CONFIG, inputs, one, inline).folder / "model.safetensors")
    as_job = sft.run(CONFIG, inputs, context_of(tmp_path / "job", inputs), RayCluster()).folder
    assert file_digest(as_job / "model.safetensors") == file_digest(one.workdir / "model" / "model.safetensors")
    start = load_file(inputs["model"].folder / "model.safetensors")
    stages: tuple[Literal[2, 3], ...] = (2, 3)
    for zero_stage in stages:
        two = context_of(tmp_path / f"zero{zero_stage}", inputs)
        output = sft.run(_two_ranks(zero_stage), inputs, two, RayCluster())
        assert _two_ranks(zero_stage).reserves().devices == 1.0
        weights = load_file(output.folder / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert max((weights[name] - expected[name]).abs().max().item() for name in weights) < 1e-5
        for (step, metrics), (expected_step, expected_metrics) in zip(two.logs, one.logs, strict=True):
            assert step == expected_step
            for name in ("loss", "gradient_norm", "tokens", "learning_rate"):
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4)
    assert all((expected[name] - start[name]).abs().max() > 1e-3 for name in start)
