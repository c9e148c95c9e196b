"""Our side of `benchmarks.grpo_vs_trl`: the RL stage as it ships, on a Ray cluster of its own.

`python -m benchmarks.grpo_ours WORKLOAD MODEL RESULT`. One engine (vLLM) and one training rank (DeepSpeed), each a Ray
actor in its own process, and the loop in this one. Weights are published and proven after every step.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import grpo_workload
from benchmarks.grpo_workload import Workload, prompt_ids, rows, write_result
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.rl import RLConfig
from rlhf_core.contract import Input
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.prompts import to_prompts
from rlhf_core.data.reading import write_dataset
from rlhf_core.stages import rl
from rlhf_core.stages.key import computing_libraries
from rlhf_core.stages.ray_cluster import RayCluster

REWARD_FILE = Path(grpo_workload.__file__)


@dataclass
class FolderContext:
    """Implements contract.StageContext on folders; keeps when each step ended."""

    workdir: Path
    folders: dict[str, Input]
    name: str = "rl"
    key: str = "0" * 64
    seed: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    ended: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(LocalStore(self.workdir / "store"), ArtifactRef(stage=self.name, key=self.key))

    def fetch(self, ref: ArtifactRef) -> Input:
        return self.folders[ref.path]

    def put_files(self, folder: Path) -> dict[str, str]:
        return ArtifactRepository(LocalStore(self.workdir / "store")).put_folder(folder)

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        ArtifactRepository(LocalStore(self.workdir / "store")).get_folder(files, folder)

    def user_file(self, path: str) -> Path:
        return Path(path)

    user_folder = user_file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ended.append((time.perf_counter(), dict(metrics)))

    def logged(self) -> bytes:
        return b""  # nobody resumes a benchmark

    def restore_log(self, lines: bytes) -> None: ...

    def progress(self, step: int, total: int, phase: str = "", **figures: float) -> None: ...


def config(workload: Workload) -> RLConfig:
    """The stage's settings; what is not said is what the stage does by default."""
    return RLConfig.model_validate({
        "algorithm": "grpo",
        "dataset": "prompts",
        "steps": workload.warm_up + workload.steps,
        "prompts_per_step": workload.prompts,
        "sampling": {"max_tokens": workload.completion_tokens},
        "rollout": {"max_length": workload.length, "cpu_cache_gib": 0.5, "threads": workload.threads},
        "placement": {"threads": workload.threads},
        "engine": {
            "dtype": workload.dtype,
            "zero_stage": 0,
            "tokens_per_micro_batch": workload.micro_batch * workload.length,
        },
        "checkpoint": {"every_minutes": None},
        "grpo": {
            "group_size": workload.group,
            "rewards": {"text": {"type": "function", "path": str(REWARD_FILE)}},
            "optimizer": {"learning_rate": 1e-6, "schedule": "constant", "warmup_share": 0.0},
        },
    })  # fmt: skip


def stage_input(folder: Path, kind: Kind) -> Input:
    """`folder` as an artifact that was fetched."""
    now = datetime.now(UTC)
    manifest = Manifest(
        kind=kind, name=kind.value, stage="benchmark", key=hashlib.sha256(kind.value.encode()).hexdigest(), files=(),
        parents={}, user_files={}, config={}, seed=0, metrics={}, code_revision="", libraries={}, device_seconds=0.0,
        device="cpu", started_at=now, finished_at=now,
    )  # fmt: skip
    return Input(manifest, folder)


def counted_steps(workload: Workload, ended: Sequence[tuple[float, Mapping[str, float]]]) -> list[dict[str, float]]:
    """Seconds of each step after the warm-up, by the phases of the comparison."""
    steps = []
    for (before, _), (after, metrics) in zip(ended[workload.warm_up - 1 :], ended[workload.warm_up :], strict=False):
        if metrics["completion_length"] != workload.completion_tokens:
            raise RuntimeError(f"completions have {metrics['completion_length']} tokens on average: not the same work")
        steps.append({
            "seconds": after - before,
            "generate": metrics["seconds/rollout"],
            "score": metrics["seconds/score"],
            "update": metrics["seconds/update"],
            "publish": metrics["seconds/publish"],
        })  # fmt: skip
    return steps


def run(workload: Workload, model: Path) -> tuple[float, list[dict[str, float]]]:
    """When the counted steps began, and the steps."""
    with tempfile.TemporaryDirectory(prefix="grpo-") as name:
        folder = Path(name)
        write_dataset(folder / "prompts", rows(workload), {})
        asked = to_prompts(rows(workload), load_tokenizer(model), max_tokens=workload.prompt_tokens)
        if {prompt.token_ids for prompt in asked} != prompt_ids(workload):
            raise RuntimeError("the prompts are not those of the workload")
        inputs = {"model": stage_input(model, Kind.POLICY), "dataset": stage_input(folder / "prompts", Kind.DATASET)}
        context = FolderContext(folder, {each.manifest.ref.path: each for each in inputs.values()})
        rl.run(config(workload), inputs, context, RayCluster())
        return context.ended[workload.warm_up - 1][0], counted_steps(workload, context.ended)


def main(arguments: Sequence[str]) -> int:
    workload, model, result = arguments
    began, steps = run(Workload.read(Path(workload)), Path(model))
    write_result(Path(result), began, steps, computing_libraries())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
