"""The spec of a job, stored beside its future artifact by the submitter."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import Config


class StageSpec(Config):
    """The only input of a job, stored at <artifact>/spec.json."""

    name: str  # the recipe's node
    stage: str
    stage_version: int
    key: str
    config: dict[str, Any]
    inputs: dict[str, ArtifactRef]
    user_files: dict[str, str]  # path as the recipe names it -> sha256 of a blob in the store
    pins: dict[str, str] = Field(default_factory=dict)  # URL of a remote source -> its content's identity
    seed: int | None  # None: the stage draws no random numbers
    libraries: dict[str, str]  # that compute -> version, the plugins that the stage uses among them
    plugins: dict[str, str] = Field(default_factory=dict)  # those, and the plugins of trackers
    tracking: dict[str, Any] = Field(default_factory=dict)
    watchdog: dict[str, Any] | None = None
    run_id: str = ""
    recipe: str = ""  # its name
    rerun: str = ""  # label of a computation that is repeated on purpose

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(stage=self.stage, key=self.key)
