"""The recipe: one YAML file that describes one run. See docs/recipes.md for the language."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config, NonNegativeInt, operational
from rlhf_core.config.base_model import BaseModelConfig
from rlhf_core.config.data import DatasetConfig
from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.stages import MergeConfig, PretrainConfig, ReportConfig, RewardModelConfig, SFTConfig


class TrackingConfig(Config):
    wandb: bool = True
    wandb_project: str = "alignment"
    tensorboard: bool = True


class Recipe(Config):
    """A section that is absent is a stage that does not run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    description: str = ""
    seed: NonNegativeInt = 0
    data: dict[str, DatasetConfig] = Field(min_length=1)
    base: BaseModelConfig
    pretrain: PretrainConfig | None = None
    sft: SFTConfig | None = None
    reward_model: RewardModelConfig | None = None
    rl: RLConfig | None = None
    merge: MergeConfig | None = MergeConfig()
    evaluation: EvaluationConfig | None = None
    report: ReportConfig | None = ReportConfig()
    tracking: TrackingConfig = operational(TrackingConfig)
