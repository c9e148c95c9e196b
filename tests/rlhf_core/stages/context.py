"""A context for stage tests: a folder instead of a store. Import it as tests.rlhf_core.stages.context."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
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


def wait_for_checkpoint() -> None:
    """Until what this process is writing beside its training is whole: on a busy machine the next would be left out."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint "):
            thread.join()


@dataclass
class LocalContext:
    """Implements contract.StageContext; `logs` and `progresses` keep what the stage said."""

    workdir: Path
    user_files_root: Path | None = None
    name: str = "test"
    key: str = "0" * 64
    given_seed: int | None = 0
    artifacts: dict[str, Input] = field(default_factory=dict)  # "stage/key" -> what fetch returns
    logs: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    progresses: list[tuple[int, int, str, dict[str, float]]] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workdir.mkdir(parents=True, exist_ok=True)

    @property
    def seed(self) -> int:
        assert self.given_seed is not None, "the stage draws no random numbers, and reads a seed"
        return self.given_seed

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(LocalStore(self.workdir / "store"), ArtifactRef(stage=self.name, key=self.key))

    @property
    def live(self) -> LiveFiles:
        return LiveFiles(LocalStore(self.workdir / "store"), ArtifactRef(stage=self.name, key=self.key))

    def fetch(self, ref: ArtifactRef, only: Collection[str] | None = None) -> Input:
        return self.artifacts[ref.path]

    def put_files(self, folder: Path) -> dict[str, str]:
        owner = ArtifactRef(stage=self.name, key=self.key)
        return ArtifactRepository(LocalStore(self.workdir / "store")).put_folder(folder, owner)

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        ArtifactRepository(LocalStore(self.workdir / "store")).get_folder(files, folder)

    def publish(self, what: str, step: int, output: Output) -> ArtifactRef:
        """To the folder `published`, beside a working folder that a killed job does not keep."""
        folder = self.workdir.parent / "published" / f"{what}.{step}"
        if not folder.exists():  # as a store, it keeps what was there first
            shutil.copytree(output.folder, folder)
        return ArtifactRef(stage=f"test.{what}", key=hashlib.sha256(folder.name.encode()).hexdigest())

    def user_file(self, path: str) -> Path:
        return self._below_root(path)

    def user_folder(self, path: str) -> Path:
        return self._below_root(path)

    def pin(self, url: str) -> str | None:
        return self.pins.get(url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logs.append((step, dict(metrics)))

    def logged(self) -> bytes:
        return "".join(json.dumps({"step": step, **metrics}) + "\n" for step, metrics in self.logs).encode()

    def restore_log(self, lines: bytes) -> None:
        assert not self.logs
        for line in lines.splitlines():
            metrics = json.loads(line)
            self.logs.append((metrics.pop("step"), metrics))

    def progress(self, step: int, total: int, phase: str = "", **figures: float) -> None:
        self.progresses.append((step, total, phase, figures))

    def _below_root(self, path: str) -> Path:
        assert self.user_files_root is not None, f"give LocalContext user_files_root: the stage asks for {path}"
        return self.user_files_root / path


def local_input(folder: Path, kind: Kind, name: str = "input", stage: str = "test") -> Input:
    """`folder` as the input of a stage, with a manifest that a fetched artifact would have."""
    now = datetime.now(UTC)
    manifest = Manifest(
        kind=kind, name=name, stage=stage, key=hashlib.sha256(str(folder).encode()).hexdigest(), files=(), parents={},
        config={}, seed=0, code_revision="test", libraries={}, device_seconds=0.0, device="cpu",
        started_at=now, finished_at=now,
    )  # fmt: skip
    return Input(manifest, folder)
