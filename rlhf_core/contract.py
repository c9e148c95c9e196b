"""What a stage is: a pure description. Imports no torch; `entry` is imported only inside the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.config.base import Config


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    version: int  # raise it when the code changes what the same settings compute
    config: type[Config]
    reads: Mapping[str, frozenset[Kind]]  # input name -> kinds it accepts; a name ending in "*" takes many
    writes: frozenset[Kind]
    entry: str  # "package.module:function", called as function(config, inputs, context) -> Output
    # Input name, as in `reads` -> the files of it that the job fetches, where it has them; other inputs come whole.
    files: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Input:
    """An input artifact, fetched: its manifest and a read-only local folder with its files."""

    manifest: Manifest
    folder: Path


@dataclass(frozen=True, slots=True)
class Output:
    """What a stage's function returns: a folder whose files become the artifact."""

    kind: Kind
    folder: Path
    metrics: Mapping[str, float | int | str | None] = field(default_factory=dict)
    devices: float = 1.0  # reserved CPUs (or GPUs), for device seconds


class StageContext(Protocol):
    """What a running stage may ask for besides its config and inputs. Also picklable into Ray actors on any node."""

    name: str
    key: str
    seed: int
    workdir: Path  # empty at start; on this node
    libraries: Mapping[str, str]  # that compute, with their versions

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of this stage's key."""

    def fetch(self, ref: ArtifactRef) -> Input:
        """The artifact on this node, its bytes verified; cached by content."""

    def user_file(self, path: str) -> Path:
        """The user's file that the recipe calls `path`, as it was when the key was computed."""

    def user_folder(self, path: str) -> Path:
        """The user's folder that the recipe calls `path`: those of its files that are part of the key."""

    def pin(self, url: str) -> str | None:
        """The identity of the remote source `url` that the key was computed with; None if none was."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the trackers beside it. Only the driver logs."""

    def logged(self) -> bytes:
        """The content of metrics.jsonl so far, which a checkpoint keeps."""

    def restore_log(self, lines: bytes) -> None:
        """Begin with the `lines` of a run that was killed, as if this one had logged them. Nothing is logged yet."""

    def progress(self, step: int, total: int, phase: str = "", **figures: float) -> None:
        """Shown in the terminal and in Prefect: which step, of how many, and the figures that matter."""
