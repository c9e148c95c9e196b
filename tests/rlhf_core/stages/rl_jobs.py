"""Stages that run as jobs: a tiny GRPO or PPO, the spec of any stage as a flow stores it, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Input
from rlhf_core.graph.user_files import user_files
from rlhf_core.models.quantisation import write_rounded
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.table import STAGES
from rlhf_core.testing.stage import without_times
from rlhf_core.tracking.protocol import METRICS_FILE
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import base_model, dataset

_SETTINGS: dict[str, Any] = {
    "dataset": "prompts", "steps": 5, "prompts_per_step": 3, "sampling": {"max_tokens": 4},
    # Rewards count the letters of a completion, special tokens not among them.
    "rollout": {"max_length": 32, "cpu_cache_gib": 0.25, "skip_special_tokens": True},
    "engine": {"dtype": "float32", "zero_stage": 2},
    "checkpoint": {"every_steps": 1},
}  # fmt: skip
_COMMON = {
    "rewards": {"short": {"type": "function", "path": "reward.py"}}, "group_size": 4,
    "optimizer": {"learning_rate": 1e-2}, "shaping": {"normalize": True},
    "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 4},
}  # fmt: skip
_BLOCKS: dict[str, dict[str, Any]] = {
    "grpo": {**_COMMON, "filtering": {"max_rounds": 64}},
    "ppo": {**_COMMON, "epochs": 2, "minibatches": 2, "critic": {"optimizer": {"learning_rate": 1e-2}}},
}
_LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}


def rl_config(algorithm: str = "grpo", **settings: Any) -> RLConfig:
    """A run of five steps with `settings` of its own."""
    return RLConfig.model_validate({**_SETTINGS, "algorithm": algorithm, algorithm: _BLOCKS[algorithm], **settings})


CONFIG = rl_config()


def two_by_two(
    zero_stage: Literal[2, 3],
    algorithm: str = "grpo",
    *,
    lora: bool = False,
    hybrid: bool = False,
    sequence: int = 1,
    tensor: int = 1,
    quantised: bool = False,
    transport: str = "folder",
    group: bool = False,
    spread: int = 1,
) -> RLConfig:
    """Two ranks and two engines, which are to share two devices if `hybrid`. sequence, tensor: ranks that share tokens,
    or weights. group: the critic of PPO and the reference are together on two further ranks. spread: workers of an
    engine; with two there is one engine.
    """
    placement = {"workers": 2, "cpus_per_worker": 0.5, "threads": 1}
    block = _BLOCKS[algorithm]
    if group:
        together = {"placement": {"group": "apart", **placement}}
        block = {**block, "critic": {**block["critic"], **together}, "kl": {**block["kl"], **together}}
    return rl_config(
        algorithm,
        **{algorithm: block},
        engine={
            "dtype": "float32",
            "zero_stage": zero_stage,
            "sequence_parallel": sequence,
            "tensor_parallel": tensor,
        },
        placement=placement,
        rollout={
            **_SETTINGS["rollout"],
            "engines": 2 // spread,
            "cpus_per_engine": 0.5 if spread == 1 else spread,
            "tensor_parallel_size": spread,
            "threads": 1,
            "serve_adapter": "adapter",
            "transport": transport,
        },
        lora={**_LORA, **({"quantised": "nf4"} if quantised else {})} if lora else None,
        dropout=lora,
        hybrid=hybrid,
    )


# Short completions are right. Where HOLD names a folder, it holds as long as the test leaves `now` in that.
REWARD = """
import os, pathlib, time

def reward(completions, prompts, rows):
    folder = pathlib.Path(os.environ.get("HOLD", "/nowhere"))
    while (folder / "now").exists():
        (folder / "held").touch()
        time.sleep(0.05)
    right = [float(len(c) <= 1) for c in completions]
    return [{"reward": r + 0.01 * len(c), "score": r} for r, c in zip(right, completions)]
"""


def job_inputs(folder: Path, config: RLConfig | None = None) -> dict[str, Input]:
    """A model that vLLM serves, and prompts. config: whose ranks share heads, or train on rounded layers."""
    prompts = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcdefg"]
    heads = 1 if config is None else max(config.engine.tensor_parallel, config.rollout.workers_per_engine)
    model = base_model(folder / "base", heads=heads, hidden=32 * heads)
    if config is not None and config.quantised is not None:
        write_rounded(model.folder, folder / "rounded", "float32")
        model = local_input(folder / "rounded", Kind.BASE_MODEL)
    return {"model": model, "dataset": dataset(folder / "data", prompts)}


def specified(
    repository: ArtifactRepository,
    inputs: Mapping[str, Input],
    root: Path,
    config: StageConfig = CONFIG,
    name: str = "rl",
) -> StageSpec:
    """The inputs and the spec of the stage, stored as a flow stores them."""
    refs = {}
    for role, item in inputs.items():
        kind = Kind.DATASET if role == "dataset" else Kind.BASE_MODEL
        refs[role] = repository.publish(item.manifest.model_copy(update={"kind": kind}), item.folder).ref
    root.mkdir(parents=True, exist_ok=True)
    (root / "reward.py").write_text(REWARD)
    files = user_files(config, root)
    for path in files:
        repository.put_blob(root / path)
    libraries, stage = computing_libraries(), STAGES[name]
    key = stage_key(stage, config, inputs=refs, user_files=files, seed=1, libraries=libraries)
    spec = StageSpec(
        name=name, stage=name, stage_version=stage.version, key=key, config=config.model_dump(mode="json"), inputs=refs,
        user_files=files, seed=1, libraries=libraries, tracking={"wandb": False, "tensorboard": False},
    )  # fmt: skip
    repository.write_spec(spec)
    return spec


def results(repository: ArtifactRepository, manifest: Manifest | None, cache: Path) -> tuple[str, list[dict[str, Any]]]:
    """The hash of the weights (with LoRA: the adapter's), and the lines of metrics."""
    assert manifest is not None
    (weights,) = (file.sha256 for file in manifest.files if file.path.endswith("model.safetensors"))
    lines = (repository.fetch(manifest.ref, cache) / METRICS_FILE).read_text().splitlines()
    return weights, [without_times(json.loads(line)) for line in lines]


def rows_of(repository: ArtifactRepository, manifest: Manifest | None, cache: Path) -> dict[str, str]:
    """The hash of each file but the metrics."""
    assert manifest is not None
    return {file.path: file.sha256 for file in manifest.files if file.path != METRICS_FILE}
