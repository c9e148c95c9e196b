"""Settings of the RL stage. `algorithm` picks one of the algorithm blocks; the others are not part of the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from rlhf_core.config.algorithms import (
    AlgorithmConfig,
    CISPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from rlhf_core.config.base import PositiveFloat, PositiveInt, Reads, Role, operational
from rlhf_core.config.checkpoint import CheckpointConfig
from rlhf_core.config.rewards import ScorerConfig
from rlhf_core.config.rollout import RolloutEngineConfig, SamplingConfig
from rlhf_core.config.stage import JudgedBy, Reservation, RowLimit, StageConfig
from rlhf_core.config.training import EngineConfig, LoraConfig, Placement, require_compatible
from rlhf_core.config.validation import ValidationConfig

Decay = Annotated[float, Field(gt=0, lt=1)]
AlgorithmName = Literal[
    "ppo", "reinforce++", "reinforce++-baseline", "rloo", "grpo", "dr-grpo", "dapo", "gspo", "cispo"
]


def block_name(algorithm: AlgorithmName) -> str:
    """The key of an algorithm's block: `reinforce++-baseline` has `reinforce_plus_plus_baseline`."""
    return algorithm.replace("++", "_plus_plus").replace("-", "_")


class RLConfig(StageConfig):
    algorithm: AlgorithmName = Field(description="which of the blocks below is used; the others are ignored")
    dataset: Annotated[str, Reads("dataset", format="prompts")] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="the stage whose model it starts from; none: the last one above that makes a model"
    )
    steps: PositiveInt = Field(description="rollout-and-update steps")
    prompts_per_step: PositiveInt = Field(description="each is answered `group_size` times")
    sampling: SamplingConfig = Field(description="of the rollouts")
    ppo: PPOConfig | None = Field(default=None, description="settings of PPO")
    reinforce_plus_plus: ReinforcePlusPlusConfig | None = Field(default=None, description="settings of REINFORCE++")
    reinforce_plus_plus_baseline: ReinforcePlusPlusBaselineConfig | None = Field(
        default=None, description="settings of REINFORCE++-baseline"
    )
    rloo: RLOOConfig | None = Field(default=None, description="settings of RLOO")
    grpo: GRPOConfig | None = Field(default=None, description="settings of GRPO")
    dr_grpo: DrGRPOConfig | None = Field(default=None, description="settings of Dr. GRPO")
    dapo: DAPOConfig | None = Field(default=None, description="settings of DAPO")
    gspo: GSPOConfig | None = Field(default=None, description="settings of GSPO")
    cispo: CISPOConfig | None = Field(default=None, description="settings of CISPO")
    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")
    engine: EngineConfig = Field(default=EngineConfig(), description="how the models are trained")
    rollout: RolloutEngineConfig = Field(description="the engines that sample")
    ema_decay: Decay | None = Field(
        default=None,
        description="below 1; exponential moving average of the trained weights, over optimizer steps: it is what is "
        "validated, and the stage's result; none: the weights themselves",
    )
    validation: ValidationConfig | None = Field(
        default=None, description="held-out prompts that are answered while training runs; none: the last weights"
    )
    placement: Placement = operational(Placement, description="what the training workers reserve")
    hybrid: bool = operational(
        False, description="worker i and engine i share a device and take turns on it, instead of one each"
    )
    checkpoint: CheckpointConfig = operational(
        CheckpointConfig, description="how often the state is kept, from which a killed job goes on"
    )
    monitors: dict[str, ScorerConfig] = operational(
        dict, description="scores that are logged each step, never trained on"
    )
    probe_tolerance: PositiveFloat | None = Field(
        default=None, description="mean |log-prob difference| of engine and trainer on the probe; none: by dtype"
    )

    @model_validator(mode="after")
    def _chosen_block_is_there(self) -> RLConfig:
        block = block_name(self.algorithm)
        if getattr(self, block) is None:
            raise ValueError(f"algorithm is {self.algorithm}, but there is no block `rl.{block}`; add one")
        return self

    @model_validator(mode="after")
    def _minibatches_are_equal(self) -> RLConfig:
        settings = self.settings
        completions = self.prompts_per_step * settings.group_size
        if completions % settings.minibatches:
            raise ValueError(
                f"{block_name(self.algorithm)}.minibatches is {settings.minibatches}, which does not divide the "
                f"{completions} completions of a step (prompts_per_step x group_size)"
            )
        return self

    @model_validator(mode="after")
    def _policy_is_trained(self) -> RLConfig:
        if self.ppo is not None and self.algorithm == "ppo" and self.ppo.critic_warmup_steps >= self.steps:
            raise ValueError(
                f"ppo.critic_warmup_steps is {self.ppo.critic_warmup_steps} of {self.steps} steps: the policy would "
                "never be trained"
            )
        return self

    @model_validator(mode="after")
    def _penalty_can_grow(self) -> RLConfig:
        overlong = self.settings.shaping.overlong
        if overlong is not None and overlong.buffer > self.sampling.max_tokens:
            longest = self.sampling.max_tokens
            raise ValueError(f"shaping.overlong.buffer is {overlong.buffer}, more than sampling.max_tokens={longest}")
        return self

    @model_validator(mode="after")
    def _engine_runs_the_optimizers(self) -> RLConfig:
        critic = [self.settings.critic_optimizer] if isinstance(self.settings, PPOConfig) else []
        require_compatible(self.engine, self.settings.optimizer, *critic)
        return self

    @model_validator(mode="after")
    def _validation_has_room(self) -> RLConfig:
        sampling = self.validation.sampling if self.validation is not None else None
        if sampling is not None and sampling.max_tokens >= self.rollout.max_length:
            raise ValueError("validation.sampling.max_tokens leaves no room for a prompt in rollout.max_length")
        return self

    @model_validator(mode="after")
    def _devices_can_be_shared(self) -> RLConfig:
        if not self.hybrid:
            return self
        placement, rollout = self.placement, self.rollout
        if rollout.tensor_parallel_size * rollout.pipeline_parallel_size > 1:
            raise ValueError("hybrid: an engine shares one worker's device, but rollout spreads each over several GPUs")
        if placement.workers != rollout.engines:
            raise ValueError(
                f"hybrid: each worker shares its device with one engine, but there are placement.workers="
                f"{placement.workers} and rollout.engines={rollout.engines}; set both to the number of devices"
            )
        if placement.gpus_per_worker != rollout.gpus_per_engine or placement.gpus_per_worker > 1:
            raise ValueError(
                f"hybrid: placement.gpus_per_worker={placement.gpus_per_worker:g} and rollout.gpus_per_engine="
                f"{rollout.gpus_per_engine:g} must be the same, 1 at most: it is one GPU that both use"
            )
        if self.engine.offload_parameters:
            raise ValueError("hybrid: engine.offload_parameters keeps the weights in main memory already; leave it out")
        return self

    @model_validator(mode="after")
    def _rollouts_explore(self) -> RLConfig:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy rollouts of one prompt are all the same; use 1.0")
        if self.sampling.truncation:
            raise ValueError(
                f"sampling.{self.sampling.truncation[0]}: rollouts are sampled from all tokens, since the policy is "
                "trained on its own log-probs, not on those of a truncated distribution: ratios, KL and gradient would "
                "be wrong; leave it out (evaluation and validation take it)"
            )
        if self.sampling.max_tokens >= self.rollout.max_length:
            raise ValueError("sampling.max_tokens leaves no room for a prompt in rollout.max_length; raise the latter")
        return self

    def unused_fields(self) -> frozenset[str]:
        return frozenset(map(block_name, get_args(AlgorithmName))) - {block_name(self.algorithm)}

    @property
    def keeps_best(self) -> bool:
        return self.validation is not None and self.validation.keep == "best"

    @property
    def settings(self) -> AlgorithmConfig:
        """The block of the chosen algorithm."""
        chosen: AlgorithmConfig = getattr(self, block_name(self.algorithm))
        return chosen

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def trains_adapter(self) -> bool:
        return self.lora is not None

    @property
    def checkpoints(self) -> CheckpointConfig:
        return self.checkpoint

    def reserves(self) -> Reservation:
        ranks, engines = self.placement.reserves(), self.rollout.reserves()
        shared = Reservation(gpus=-ranks.gpus) if self.hybrid else Reservation()  # the GPUs of both are the same
        return ranks + engines + shared

    def sequence_lengths(self) -> Mapping[str, int]:
        return {"rollout.max_length": self.rollout.max_length}

    def rewards(self) -> Iterator[JudgedBy]:
        for name, reward in self.settings.rewards.items():
            yield JudgedBy(f"{block_name(self.algorithm)}.rewards.{name}", reward, "dataset")
        for name, monitor in self.monitors.items():
            yield JudgedBy(f"monitors.{name}", monitor, "dataset")
        for name, scorer in self.validation.scorers.items() if self.validation is not None else ():
            yield JudgedBy(f"validation.scorers.{name}", scorer, "validation.dataset")

    def row_limit(self, dataset: str) -> RowLimit | None:
        own = self.validation.sampling if self.validation is not None and dataset == "validation.dataset" else None
        sampling, setting = (self.sampling, "sampling") if own is None else (own, "validation.sampling")
        return RowLimit("rollout.max_length", self.rollout.max_length, f"{setting}.max_tokens", sampling.max_tokens)

    def moe_coefficients(self) -> Mapping[str, float]:
        return {f"{block_name(self.algorithm)}.moe_coefficient": self.settings.moe_coefficient}
