"""Our side of the benchmarks against TRL: a stage as shipped, on folders and a Ray cluster of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.contract import Input, Output


@dataclass
class FolderContext:
    """Implements contract.StageContext on folders; records the end of each step."""

    workdir: Path
    folders: dict[str, Input]
    name: str = "stage"
    key: str = "0" * 64
    seed: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    ended: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(LocalStore(self.workdir / "store"), ArtifactRef(stage=self.name, key=self.key))

    @property
    def live(self) -> LiveFiles:
        return LiveFiles(LocalStore(self.workdir / "store"), ArtifactRef(stage=self.name, key=self.key))

    def fetch(self, ref: ArtifactRef, only: Collection[str] | None = None) -> Input:
        return self.folders[ref.path]

    def put_files(self, folder: Path) -> dict[str, str]:
        owner = ArtifactRef(stage=self.name, key=self.key)
        return ArtifactRepository(LocalStore(self.workdir / "store")).put_folder(folder, owner)

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        ArtifactRepository(LocalStore(self.workdir / "store")).get_folder(files, folder)

    def user_file(self, path: str) -> Path:
        return Path(path)

    user_folder = user_file

    def pin(self, url: str) -> str | None:
        return None

    def publish(self, what: str, step: int, output: Output) -> ArtifactRef:
        raise NotImplementedError("no benchmark asks a stage to keep what it makes on the way")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ended.append((time.perf_counter(), dict(metrics)))

    def logged(self) -> bytes:
        return b""  # nobody resumes a benchmark

    def restore_log(self, lines: bytes) -> None: ...

    def progress(self, step: int, total: int, phase: str = "", **figures: float) -> None: ...


def stage_input(folder: Path, kind: Kind) -> Input:
    """Return `folder` as a fetched artifact."""
    now = datetime.now(UTC)
    manifest = Manifest(
        kind=kind, name=kind.value, stage="benchmark", key=hashlib.sha256(kind.value.encode()).hexdigest(), files=(),
        parents={}, user_files={}, config={}, seed=0, metrics={}, code_revision="", libraries={}, device_seconds=0.0,
        device="cpu", started_at=now, finished_at=now, pins={},
    )  # fmt: skip
    return Input(manifest, folder)


def stage_inputs(model: Path, dataset: Path, workdir: Path) -> tuple[dict[str, Input], FolderContext]:
    """Return the inputs `model` and `dataset` of a stage, and its context in `workdir`."""
    inputs = {"model": stage_input(model, Kind.POLICY), "dataset": stage_input(dataset, Kind.DATASET)}
    return inputs, FolderContext(workdir, {each.manifest.ref.path: each for each in inputs.values()})
