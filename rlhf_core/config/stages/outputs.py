"""Settings of nodes that compute no model: existing artifacts, and the report."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import operational
from rlhf_core.config.data.dataset import OnOverlap
from rlhf_core.config.numbers import ShownPrompts
from rlhf_core.config.stages.base import NamedStageConfig, StageConfig
from rlhf_core.config.texts import NonEmpty


class ArtifactConfig(NamedStageConfig):
    """An existing artifact. It is looked up when the run is planned; nothing is computed."""

    ref: NonEmpty = Field(
        description="stage/key as `alignment artifacts` prints it (some digits of the key suffice), or an alias: "
        "`model/alias`, or `alias` where only one model has it"
    )
    on_overlap: OnOverlap = operational(
        "error", description="of a dataset: treatment of training rows with a prompt that is evaluated on"
    )

    @property
    def compares_overlap(self) -> bool:
        return self.on_overlap == "error"


class ReportConfig(StageConfig):
    title: str = Field(default="", description="title of the page; empty: `Alignment run`, and the recipe's name")
    samples: ShownPrompts = Field(default=12, description="number of prompts whose answers are shown, before and after")
