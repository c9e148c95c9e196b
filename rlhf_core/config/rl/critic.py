"""Settings of the critic, a value model that is trained beside the policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, operational
from rlhf_core.config.engines.placement import ModelPlacement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import PositiveReward, WarmupSteps
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig

# The value of `start` for the initial model of RL.
POLICY_START = "policy"


class CriticConfig(Config):
    """The critic starts with a fresh head from a language model, or with the head of a reward model."""

    start: Annotated[str | None, Reads("model", or_role="reward_model", optional=True, reserved=(POLICY_START,))] = (
        Field(
            default=None,
            description="stage of the initial model or reward model, or `policy`: the initial model of RL; none: the "
            "reward model among the rewards (of several the first by the reward's name), else `policy`",
        )
    )
    optimizer: OptimizerConfig = Field(description="optimizer of the critic")
    lora: LoraConfig | None = Field(
        default=None,
        description="train an adapter and the head; if the policy is an adapter of the same model, both share one "
        "base in memory (in the same dtype, and not at zero_stage 3); none: all weights",
    )
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the critic; none: those of the policy"
    )
    placement: ModelPlacement | None = operational(
        None, description="resources of the critic's own workers; none: it runs on the policy's"
    )
    warmup_steps: WarmupSteps = Field(default=0, description="number of first steps that train only the critic")
    value_clip: PositiveReward | None = Field(
        default=0.2, description="maximum change of a value in one update; none: not clipped"
    )
    save: bool = Field(
        default=False, description="also keep the critic, in the folder `critic` of the policy; an adapter is merged"
    )

    @model_validator(mode="after")
    def _starts_alike_everywhere(self) -> CriticConfig:
        if self.placement is not None and self.lora is not None:
            raise ValueError(
                "placement: the random values that the critic's adapter starts from are drawn after the policy's, on "
                "its workers; remove lora or placement"
            )
        return self
