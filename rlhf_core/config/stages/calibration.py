"""Settings of calibrations: a rubric's judge compared with people."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads, Role
from rlhf_core.config.numbers import Kappa
from rlhf_core.config.rewards.rewards import Rubric
from rlhf_core.config.stages.base import NamedStageConfig
from rlhf_core.config.texts import NonEmpty


class CalibrationConfig(NamedStageConfig):
    """Compares the verdicts of a rubric's judge with those of people, criterion by criterion."""

    dataset: Annotated[str, Reads("dataset", format="prompts", only_read=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts, with a completion and people's verdicts "
        "in each row"
    )
    reward: Rubric = Field(description="the rubric and its judge, with the settings of the reward")
    completion: NonEmpty = Field(default="completion", description="column with the completion")
    verdicts: NonEmpty = Field(
        default="verdicts", description="column with a mapping: criterion -> whether the completion meets it"
    )
    least_kappa: Kappa | None = Field(
        default=None,
        description="the stage fails if the lower end of kappa's 95 % interval is less, so that nothing trains by this "
        "judge; none: no limit",
    )

    @property
    def makes(self) -> Role:
        return "calibration"

    @model_validator(mode="after")
    def _is_not_calibrated_by_another(self) -> Self:
        if self.reward.calibration is not None:
            raise ValueError("reward.calibration: this stage is the calibration: remove it here")
        return self
