"""Artifacts: files by content hash, with a manifest of their provenance."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import AwareDatetime, Field, field_validator

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.config.base import Config

MetricValue = float | int | str | None  # of a stage's result


class Kind(StrEnum):
    BASE_MODEL = "base_model"
    DATASET = "dataset"
    POLICY = "policy"
    ADAPTER = "adapter"
    LOGPROBS = "logprobs"
    TOP_LOGPROBS = "top_logprobs"
    REWARD_MODEL = "reward_model"
    EVALUATION = "evaluation"
    CALIBRATION = "calibration"
    ROUND = "round"
    GATE = "gate"
    REPORT = "report"
    STACKS = "stacks"


class ArtifactRef(Config):
    """Stage and key of an artifact, determined before the artifact exists."""

    stage: str
    key: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def full(self) -> str:
        """Name with all digits of the key, as a recipe may use it."""
        return f"{self.stage}/{self.key}"

    @property
    def path(self) -> str:
        """Folder in the store."""
        return f"stages/{self.full}"

    def __str__(self) -> str:
        return f"{self.stage}/{self.key[:12]}"


class FileEntry(Config):
    path: str  # relative, posix, no '..'
    size: int
    sha256: str


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Manifest(Config):
    """Manifest of an artifact. Written once, last: an artifact with a manifest is done."""

    kind: Kind
    name: str  # the recipe's node, e.g. "sft" or "evaluation.rl"
    recipe: str = ""  # the name of the recipe that it was first computed for
    stage: str
    key: str
    files: tuple[FileEntry, ...]
    parents: dict[str, ArtifactRef]  # input name -> artifact
    user_files: dict[str, str] = Field({})  # path as the recipe names it -> sha256
    pins: dict[str, str] = Field({})  # URL of a remote source -> its content's identity
    config: dict[str, Any]
    seed: int | None  # None: nothing was drawn at random
    rerun: str = ""  # label of a computation that was repeated on purpose
    metrics: dict[str, MetricValue] = Field({})
    code_revision: str
    libraries: dict[str, str]
    device_seconds: float  # reserved CPUs or GPUs x seconds, of all attempts: those that failed or were killed too
    attempts: tuple[Attempt, ...] = ()  # all until this one, which has published it; none: of an earlier release
    device: str  # "cpu" or the GPU's name
    started_at: AwareDatetime
    finished_at: AwareDatetime

    @field_validator("files")
    @classmethod
    def _in_one_folder(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """Reject paths that collide or leave the artifact's folder: others can write to the store."""
        paths = [file.path for file in files]
        taken = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
        for path in paths:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts:
                raise ValueError(f"the file `{path}` would lead out of the artifact's folder")
            if path != pure.as_posix() or not pure.parts or "\0" in path:
                raise ValueError(f"`{path}` is not a normalised path of a file")
            if path in taken:
                raise ValueError(f"the file `{path}` is named twice, or is a folder too")
            taken.add(path)
        return files

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(stage=self.stage, key=self.key)
