"""The supervised stages' own settings: pre-training, SFT, reward model, merge, report."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.base import Config, NonNegativeFloat, operational
from rlhf_core.config.training import LoraConfig, Placement, SupervisedConfig


def _moe_coefficient() -> Any:
    return Field(default=0.0, description="weight of a mixture-of-experts model's load-balancing loss")


class PretrainConfig(SupervisedConfig):
    """Plain text, every token trained, documents cut into sequences of `max_length`."""

    moe_coefficient: NonNegativeFloat = _moe_coefficient()


class SFTConfig(SupervisedConfig):
    """Conversations; only the tokens of assistant turns are trained."""

    moe_coefficient: NonNegativeFloat = _moe_coefficient()
    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")


class RewardModelConfig(SupervisedConfig):
    """Preference pairs, Bradley-Terry. `batch_size` counts pairs."""

    loss: Literal["sigmoid", "logexp"] = Field(
        default="sigmoid", description="-log sigmoid of the difference, or log(1 + exp) of it"
    )
    language_model_coefficient: NonNegativeFloat = Field(
        default=0.0, description="weight of the language-model loss on chosen completions"
    )
    moe_coefficient: NonNegativeFloat = _moe_coefficient()
    lora: LoraConfig | None = Field(default=None, description="train an adapter, merged at the end; none: all weights")


class MergeConfig(Config):
    """Folds an adapter into its base. A policy of full weights passes through untouched."""

    placement: Placement = operational(Placement, description="unused: a merge runs in its job's own process")


class ReportConfig(Config):
    title: str = Field(default="", description="of the page; empty: `Alignment run`, and the recipe's name")
    samples: int = Field(default=12, description="prompts whose answers are shown, before and after")
