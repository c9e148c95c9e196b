"""GRPO as a job, with vLLM and a DeepSpeed rank in Ray actors: killed in the middle of a step, and submitted again."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.rl import RLConfig
from rlhf_core.contract import Input
from rlhf_core.pipeline.user_files import user_files
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES
from tests.rlhf_core.stages.killed_runs import finish, kill_when_held, start, without_times
from tests.rlhf_core.stages.supervised_runs import base_model, dataset

CONFIG = RLConfig.model_validate({
    "algorithm": "grpo", "dataset": "prompts", "steps": 5, "prompts_per_step": 3, "sampling": {"max_tokens": 4},
    "rollout": {"max_length": 32, "cpu_cache_gib": 0.25}, "engine": {"dtype": "float32", "zero_stage": 2},
    "checkpoint": {"every_steps": 1},
    "grpo": {
        "rewards": {"short": {"type": "function", "path": "reward.py"}}, "group_size": 4,
        "optimizer": {"learning_rate": 1e-2}, "shaping": {"normalize": True}, "filtering": {"max_rounds": 64},
        "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 4},
    },
})  # fmt: skip
# Short completions are right. Where HOLD names a folder, it holds once the test has put `now` into that.
REWARD = """
import os, pathlib, time

def reward(completions, prompts, rows):
    folder = os.environ.get("HOLD")
    if folder and pathlib.Path(folder, "now").exists():
        pathlib.Path(folder, "held").touch()
        time.sleep(60)
    right = [float(len(c) <= 1) for c in completions]
    return [{"reward": r + 0.01 * len(c), "score": r} for r, c in zip(right, completions)]
"""


def job(store_url: str, spec: StageSpec, folder: Path, environment: dict[str, str]) -> None:
    """The job of the spec, its output in a file, as on a cluster."""
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
    os.environ.update(environment)
    run_job(store_url, spec.ref)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    prompts = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcdefg"]
    return {"model": base_model(folder / "base", heads=1), "dataset": dataset(folder / "data", prompts)}


def specified(repository: ArtifactRepository, inputs: dict[str, Input], root: Path) -> StageSpec:
    """The inputs and the spec of the stage, stored as a flow stores them."""
    refs = {}
    for name, item in inputs.items():
        kind = Kind.DATASET if name == "dataset" else Kind.BASE_MODEL
        refs[name] = repository.publish(item.manifest.model_copy(update={"kind": kind}), item.folder).ref
    (root / "reward.py").write_text(REWARD)
    files = user_files(CONFIG, root)
    for path in files:
        repository.put_blob(root / path)
    libraries, stage = computing_libraries(), STAGES["rl"]
    key = stage_key(stage, CONFIG, inputs=refs, user_files=files, seed=1, libraries=libraries)
    spec = StageSpec(
        name="rl", stage="rl", stage_version=stage.version, key=key, config=CONFIG.model_dump(mode="json"), inputs=refs,
        user_files=files, seed=1, libraries=libraries, tracking={"wandb": False, "tensorboard": False},
    )  # fmt: skip
    repository.write_spec(spec)
    return spec


def results(repository: ArtifactRepository, manifest: Manifest | None, cache: Path) -> tuple[str, list[dict[str, Any]]]:
    """The hash of the weights, and the lines of metrics."""
    assert manifest is not None
    weights = next(file.sha256 for file in manifest.files if file.path == "model.safetensors")
    lines = (repository.fetch(manifest.ref, cache) / "metrics.jsonl").read_text().splitlines()
    return weights, [without_times(json.loads(line)) for line in lines]


def test_a_killed_job_ends_as_if_it_had_not_been(ray_cluster: None, inputs: dict[str, Input], tmp_path: Path) -> None:
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "ALIGNMENT_CACHE": str(tmp_path / "cache")}
    whole, killed = (ArtifactRepository(open_store(str(tmp_path / name / "store"))) for name in ("whole", "killed"))
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    spec = specified(whole, inputs, tmp_path / "whole")
    assert specified(killed, inputs, tmp_path / "killed") == spec
    undisturbed = start(job, whole.store.url, spec, tmp_path / "whole", environment)
    first = start(job, killed.store.url, spec, tmp_path / "killed", environment | {"HOLD": str(tmp_path / "killed")})
    checkpoints = Checkpoints(killed.store, spec.ref)
    while (checkpoints.newest_step() or 0) < 2:
        assert first.is_alive(), (tmp_path / "killed" / "log").read_text()
        time.sleep(0.05)
    (tmp_path / "killed" / "now").touch()
    kill_when_held(first, tmp_path / "killed")
    step = checkpoints.newest_step()
    finish(start(job, killed.store.url, spec, tmp_path / "killed", environment))
    finish(undisturbed)
    assert f'"phase": "resumes after step {step}"' in (tmp_path / "killed" / "log").read_text()
    assert checkpoints.newest_step() is None  # they go when the artifact is there
    expected = results(whole, whole.manifest(spec.ref), tmp_path / "cache")
    assert results(killed, killed.manifest(spec.ref), tmp_path / "cache") == expected
    assert [line["step"] for line in expected[1]] == [0, 1, 2, 3, 4]
