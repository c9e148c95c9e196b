"""What a job must do: the document that its submitter stores beside the artifact to be."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import Config


class StageSpec(Config):
    """All that a job must know, stored at <artifact>/spec.json; the job has no other input."""

    name: str  # the recipe's node
    stage: str
    stage_version: int
    key: str
    config: dict[str, Any]
    inputs: dict[str, ArtifactRef]
    user_files: dict[str, str]  # path as the recipe names it -> sha256 of a blob in the store
    pins: dict[str, str] = Field(default_factory=dict)  # URL of a remote source -> its content's identity
    seed: int | None  # None: the stage draws no random numbers
    libraries: dict[str, str]
    tracking: dict[str, Any] = Field(default_factory=dict)
    run_id: str = ""
    recipe: str = ""  # its name

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(stage=self.stage, key=self.key)
