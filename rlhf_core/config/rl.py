"""Settings of the RL stage. `algorithm` picks one of the algorithm blocks; the others are not part of the result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, NonNegativeFloat, PositiveFloat, PositiveInt, Share, operational
from rlhf_core.config.rewards import RewardConfig, ScorerConfig
from rlhf_core.config.rollout import RolloutEngineConfig, SamplingConfig
from rlhf_core.config.training import EngineConfig, LoraConfig, OptimizerConfig, Placement


class AlgorithmConfig(Config):
    """What every policy-gradient algorithm shares."""

    reward: RewardConfig
    optimizer: OptimizerConfig
    group_size: PositiveInt = Field(1, description="completions of one prompt")
    epochs: PositiveInt = Field(1, description="passes over one batch of experience")
    minibatches: PositiveInt = Field(1, description="optimizer steps of one pass")
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    kl_coefficient: NonNegativeFloat = Field(0.0, description="0 loads no reference model")
    entropy_coefficient: NonNegativeFloat = 0.0


class PPOConfig(AlgorithmConfig):
    """arXiv:1707.06347 as used in arXiv:2203.02155: critic, GAE, per-token KL to the SFT model in the reward."""

    critic_optimizer: OptimizerConfig
    critic_start: Literal["reward_model", "policy"] = "reward_model"
    critic_warmup_steps: int = Field(0, ge=0, description="first steps that train the critic alone")
    value_clip: PositiveFloat | None = 0.2
    gamma: Share = 1.0
    gae_lambda: Share = 0.95
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"


class GRPOConfig(AlgorithmConfig):
    """arXiv:2402.03300: advantages normalised within a group of completions of one prompt, no critic."""

    group_size: PositiveInt = Field(8, ge=2)
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="the KL is a term of the loss here")


ALGORITHMS = ("ppo", "grpo")


class RLConfig(Config):
    algorithm: Literal["ppo", "grpo"]
    dataset: str = Field(description="name of an entry of the recipe's `data`, format prompts")
    steps: PositiveInt = Field(description="rollout-and-update steps")
    prompts_per_step: PositiveInt
    sampling: SamplingConfig
    ppo: PPOConfig | None = None
    grpo: GRPOConfig | None = None
    lora: LoraConfig | None = None
    engine: EngineConfig = EngineConfig()
    rollout: RolloutEngineConfig
    placement: Placement = operational(Placement)
    monitors: dict[str, ScorerConfig] = operational(dict, description="scores that are logged each step, never trained on")
    probe_tolerance: PositiveFloat | None = Field(
        None, description="largest |log-prob difference| of engine and trainer on the probe; none: by dtype"
    )

    @model_validator(mode="after")
    def _chosen_block_is_there(self) -> RLConfig:
        if getattr(self, self.algorithm) is None:
            raise ValueError(f"algorithm is {self.algorithm}, but there is no block `rl.{self.algorithm}`; add one")
        return self

    @model_validator(mode="after")
    def _rollouts_explore(self) -> RLConfig:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy rollouts of one prompt are all the same; use 1.0")
        if self.sampling.max_tokens >= self.rollout.max_length:
            raise ValueError("sampling.max_tokens leaves no room for a prompt in rollout.max_length; raise the latter")
        return self

    def unused_fields(self) -> frozenset[str]:
        return frozenset(ALGORITHMS) - {self.algorithm}

    @property
    def settings(self) -> PPOConfig | GRPOConfig:
        """The block of the chosen algorithm."""
        chosen: PPOConfig | GRPOConfig = getattr(self, self.algorithm)
        return chosen
