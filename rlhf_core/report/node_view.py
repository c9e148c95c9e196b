"""A stage of a run as pages show it: its artifact, its state, and its manifest where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core.artifacts.manifest import ArtifactRef, Manifest

State = Literal["reused", "computed", "failed", "not run", "done", "running", "waiting"]


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    ref: ArtifactRef
    state: State
    manifest: Manifest | None
    error: str = ""
    holder: str = ""  # the process that computes it now

    @property
    def seconds(self) -> float | None:
        """Seconds that its result took; None before there is one."""
        return None if self.manifest is None else (self.manifest.finished_at - self.manifest.started_at).total_seconds()
