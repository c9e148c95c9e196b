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
    wandb: bool = Field(default=True, description="Weights & Biases; offline where there is no key")
    wandb_project: str = Field(default="alignment", description="project that the runs belong to")
    tensorboard: bool = Field(default=True, description="event files, kept in the artifact")


class Recipe(Config):
    """A section that is absent is a stage that does not run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="lower-case letters, digits, `_`, `.`, `-`")
    description: str = Field(default="", description="one line for people")
    seed: NonNegativeInt = Field(default=0, description="of everything random")
    data: dict[str, DatasetConfig] = Field(min_length=1, description="datasets by name")
    base: BaseModelConfig = Field(description="the model to start from")
    pretrain: PretrainConfig | None = Field(default=None, description="continues pre-training on plain text")
    sft: SFTConfig | None = Field(default=None, description="supervised fine-tuning")
    reward_model: RewardModelConfig | None = Field(
        default=None, description="learns from preference pairs; left out where RL does not use it"
    )
    rl: RLConfig | None = Field(default=None, description="reinforcement learning")
    merge: MergeConfig | None = Field(default=MergeConfig(), description="how adapters are merged into full weights")
    evaluation: EvaluationConfig | None = Field(default=None, description="compares the models on held-out prompts")
    report: ReportConfig | None = Field(default=ReportConfig(), description="one HTML page about the run")
    tracking: TrackingConfig = operational(TrackingConfig, description="where figures go besides metrics.jsonl")
