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

    reward: RewardConfig = Field(description="what trains")
    optimizer: OptimizerConfig = Field(description="of the policy")
    group_size: PositiveInt = Field(default=1, description="completions of one prompt")
    epochs: PositiveInt = Field(default=1, description="passes over one batch of experience")
    minibatches: PositiveInt = Field(default=1, description="optimizer steps of one pass")
    clip_low: PositiveFloat = Field(
        default=0.2, description="the ratio of new to old probability is clipped at 1 - this"
    )
    clip_high: PositiveFloat = Field(default=0.2, description="and at 1 + this")
    kl_coefficient: NonNegativeFloat = Field(default=0.0, description="0 loads no reference model")
    entropy_coefficient: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus in the loss")


class PPOConfig(AlgorithmConfig):
    """arXiv:1707.06347 as used in arXiv:2203.02155: critic, GAE, per-token KL to the SFT model in the reward."""

    critic_optimizer: OptimizerConfig = Field(description="of the critic")
    critic_start: Literal["reward_model", "policy"] = Field(
        default="reward_model", description="whose weights the critic starts from"
    )
    critic_warmup_steps: int = Field(default=0, ge=0, description="first steps that train the critic alone")
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="largest change of a value in one update; none: not clipped"
    )
    gamma: Share = Field(default=1.0, description="discount of a later reward, per token")
    gae_lambda: Share = Field(default=0.95, description="0: one-step advantages, 1: whole returns")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="of the KL to the model that RL starts from, part of the reward"
    )


class GRPOConfig(AlgorithmConfig):
    """arXiv:2402.03300: advantages normalised within a group of completions of one prompt, no critic."""

    group_size: PositiveInt = Field(default=8, ge=2, description="completions of one prompt")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="the KL is a term of the loss here")


ALGORITHMS = ("ppo", "grpo")


class RLConfig(Config):
    algorithm: Literal["ppo", "grpo"] = Field(description="which of the blocks below is used; the others are ignored")
    dataset: str = Field(description="name of an entry of the recipe's `data`, format prompts")
    steps: PositiveInt = Field(description="rollout-and-update steps")
    prompts_per_step: PositiveInt = Field(description="each is answered `group_size` times")
    sampling: SamplingConfig = Field(description="of the rollouts")
    ppo: PPOConfig | None = Field(default=None, description="settings of PPO")
    grpo: GRPOConfig | None = Field(default=None, description="settings of GRPO")
    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")
    engine: EngineConfig = Field(default=EngineConfig(), description="how the models are trained")
    rollout: RolloutEngineConfig = Field(description="the engines that sample")
    placement: Placement = operational(Placement, description="what the training workers reserve")
    monitors: dict[str, ScorerConfig] = operational(
        dict, description="scores that are logged each step, never trained on"
    )
    probe_tolerance: PositiveFloat | None = Field(
        default=None, description="largest |log-prob difference| of engine and trainer on the probe; none: by dtype"
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
