"""The supervised stages' own settings: pre-training, SFT, reward model, merge, report."""

from __future__ import annotations

from typing import Literal

from rlhf_core.config.base import Config, NonNegativeFloat, operational
from rlhf_core.config.training import LoraConfig, Placement, SupervisedConfig


class PretrainConfig(SupervisedConfig):
    """Plain text, every token trained, documents cut into sequences of `max_length`."""


class SFTConfig(SupervisedConfig):
    """Conversations; only the tokens of assistant turns are trained."""

    lora: LoraConfig | None = None


class RewardModelConfig(SupervisedConfig):
    """Preference pairs, Bradley-Terry. `batch_size` counts pairs."""

    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    language_model_coefficient: NonNegativeFloat = 0.0
    lora: LoraConfig | None = None


class MergeConfig(Config):
    """Folds an adapter into its base. A policy of full weights passes through untouched."""

    placement: Placement = operational(Placement)


class ReportConfig(Config):
    samples: int = 12
