"""Settings of the RL stage. `algorithm` chooses one of the algorithm blocks; the others are not part of the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.algorithm_table import ALGORITHMS, known_algorithm
from rlhf_core.config.algorithms import AlgorithmConfig
from rlhf_core.config.base import Config, KeyedConfig, Reads, Role, operational
from rlhf_core.config.checkpoint import CheckpointConfig
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.environments import EnvironmentConfig, SingleTurn
from rlhf_core.config.keep import KeepConfig
from rlhf_core.config.numbers import MOST_COMPLETIONS, BatchSize, EMADecay, Steps, Tolerance
from rlhf_core.config.placement import Placement, Reservation
from rlhf_core.config.rewards import EnvironmentReward, ScorerConfig
from rlhf_core.config.rollout import SamplingConfig
from rlhf_core.config.stage import EnginesConfig, JudgedBy, RowLimit
from rlhf_core.config.training import LoraConfig, require_compatible, require_devices, require_dropout, require_examples
from rlhf_core.config.validation import ValidationConfig, ValidationSet, path_of_set


class RLConfig(EnginesConfig, KeyedConfig):
    """`algorithm` chooses one of the algorithm blocks; the others are ignored."""

    algorithm: Annotated[str, AfterValidator(known_algorithm)] = Field(
        description="whose block is used; the other blocks are ignored", json_schema_extra={"enum": [*ALGORITHMS]}
    )
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="the stage whose model it starts from; none: the last one above that makes a model"
    )
    dataset: Annotated[str, Reads("dataset", format="prompts")] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    steps: Steps = Field(description="rollout-and-update steps")
    prompts_per_step: BatchSize = Field(description="each is answered `group_size` times")
    sampling: SamplingConfig = Field(description="of the rollouts")
    environment: EnvironmentConfig = Field(
        default=SingleTurn(), description="what the policy talks with, turn by turn; by default there is one reply"
    )
    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")
    dropout: bool = Field(
        default=False,
        description="update policy and critic with the dropout and router noise of their config.json and of an "
        "adapter: the updated policy is then another than the one that sampled",
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), description="how the policy is trained, and each model without an engine of its own"
    )
    ema_decay: EMADecay | None = Field(
        default=None,
        description="below 1; exponential moving average of the trained weights, over optimizer steps: it is what is "
        "validated, and the stage's result; none: the weights themselves",
    )
    validation: ValidationConfig | None = Field(
        default=None, description="held-out prompts that are answered while training runs; none: the last weights"
    )
    keep: KeepConfig = Field(default=KeepConfig(), description="what is kept of its steps, as artifacts of their own")
    placement: Placement = operational(Placement, description="what the training workers reserve")
    hybrid: bool = operational(False, description="worker i and engine i time-share one device instead of using two")
    checkpoint: CheckpointConfig = operational(
        CheckpointConfig, description="how often the state is saved, from which a killed job resumes"
    )
    monitors: dict[str, ScorerConfig] = operational(
        dict, description="scores that are logged each step, never trained on"
    )
    probe_tolerance: Tolerance | None = Field(
        default=None, description="mean |log-prob difference| of engine and trainer on the probe; none: by dtype"
    )

    @classmethod
    def block_class(cls, key: str, raw: Any) -> type[Config] | None:
        return next((entry.config for entry in ALGORITHMS.values() if entry.block == key), None)

    @classmethod
    def block_names(cls) -> list[str]:
        return [entry.block for entry in ALGORITHMS.values()]

    @model_validator(mode="after")
    def _chosen_block_is_there(self) -> RLConfig:
        if self.block not in self.blocks:
            raise ValueError(f"algorithm is {self.algorithm}, but there is no block `{self.block}` beside it; add one")
        return self

    @model_validator(mode="after")
    def _minibatches_are_equal(self) -> RLConfig:
        settings = self.settings
        completions = self.prompts_per_step * settings.group_size
        if completions > MOST_COMPLETIONS:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} x {self.block}.group_size={settings.group_size} are "
                f"{completions} completions of one step, and the most are {MOST_COMPLETIONS}"
            )
        if completions % settings.minibatches:
            raise ValueError(
                f"{self.block}.minibatches is {settings.minibatches}, which does not divide the "
                f"{completions} completions of a step (prompts_per_step x group_size)"
            )
        return self

    @model_validator(mode="after")
    def _workers_have_examples(self) -> RLConfig:
        settings = self.settings
        what = f"prompts_per_step x {self.block}.group_size / {self.block}.minibatches"
        examples = self.prompts_per_step * settings.group_size // settings.minibatches
        require_examples(examples, what, self.placement)
        return self

    @model_validator(mode="after")
    def _devices_run_the_engines(self) -> RLConfig:
        for role, engine in self._engines().items():
            require_devices(engine, self.own_placements.get(role, self.placement))
        return self

    @model_validator(mode="after")
    def _engines_serve_the_adapter(self) -> RLConfig:
        if self.lora is not None and "lm_head" in self.lora.target_modules:
            raise ValueError("lora.target_modules names lm_head, whose adapters the engines cannot serve; leave it out")
        return self

    @model_validator(mode="after")
    def _policy_is_trained(self) -> RLConfig:
        critic = self.settings.critic_settings
        if critic is not None and critic.warmup_steps >= self.steps:
            raise ValueError(
                f"{self.block}.critic.warmup_steps is {critic.warmup_steps} of {self.steps} steps: the policy would "
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
    def _dropout_is_used(self) -> RLConfig:
        critic = self.settings.critic_settings
        require_dropout(self.dropout, lora=self.lora)
        require_dropout(self.dropout, **{f"{self.block}.critic.lora": critic.lora if critic is not None else None})
        return self

    @model_validator(mode="after")
    def _engines_run_the_optimizers(self) -> RLConfig:
        require_compatible(self.engine_of("policy"), self.settings.optimizer)
        if self.settings.critic_settings is not None:
            require_compatible(self.engine_of("critic"), self.settings.critic_settings.optimizer)
        return self

    @model_validator(mode="after")
    def _reference_settings_are_used(self) -> RLConfig:
        kl = self.settings.kl
        given = {"engine": kl.engine is not None, "offload": kl.offload, "placement": kl.placement is not None}
        setting = next((name for name, is_given in given.items() if is_given), None)
        if self.reference_is_base and setting is not None:
            raise ValueError(
                f"{self.block}.kl.{setting}: with `lora` the reference is the policy's base with its adapter off, and "
                "has no weights of its own; leave it out, or name a model as kl.reference"
            )
        return self

    @model_validator(mode="after")
    def _reference_rounds_as_the_policy(self) -> RLConfig:
        if not self.settings.uses_reference:
            return self
        policy, reference = self.engine_of("policy"), self.engine_of("reference")
        for name in ("dtype", "attention"):
            ours, theirs = getattr(policy, name), getattr(reference, name)
            if ours != theirs:
                raise ValueError(
                    f"{self.block}.kl.engine.{name} is {theirs}, but the policy's is {ours}: rounding would count as "
                    "KL, so that the KL of the policy to itself would not be 0; set both alike"
                )
        return self

    @model_validator(mode="after")
    def _validation_has_room(self) -> RLConfig:
        for place, held_out in self._sets_by_place().items():
            sampling = held_out.sampling
            if sampling is not None and sampling.max_tokens >= self.rollout.max_length:
                raise ValueError(f"{place}.sampling.max_tokens leaves no room for a prompt in rollout.max_length")
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
        on_ranks = [engine for role, engine in self._engines().items() if role not in self.own_placements]
        if any(engine.offload_parameters for engine in on_ranks):
            raise ValueError("hybrid: engine.offload_parameters keeps the weights in host memory already; leave it out")
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

    @model_validator(mode="after")
    def _environment_is_measured(self) -> RLConfig:
        if self.has_environment and self.validation is not None:
            raise ValueError(
                f"validation asks for single replies, without the environment `{self.environment.type}` that it is "
                "trained in, so it would measure something else: leave `validation` out"
            )
        for name, reward in self.settings.rewards.items():
            if isinstance(reward, EnvironmentReward) and not self.has_environment:
                raise ValueError(
                    f"{self.block}.rewards.{name} is what an environment gives, but `environment` is single_turn, "
                    "which gives nothing: set an environment, or another reward"
                )
        return self

    @model_validator(mode="after")
    def _rollouts_are_completions(self) -> RLConfig:
        if self.keep.rollouts_every is not None and self.environment.max_turns > 1:
            raise ValueError(
                "keep.rollouts_every: rollouts are kept as completions of prompts, and an episode of several turns is "
                "none; leave it out"
            )
        return self

    @property
    def has_environment(self) -> bool:
        return self.environment != SingleTurn()

    @property
    def max_sampled_tokens(self) -> int:
        """The most that the policy can sample in one episode."""
        return self.sampling.max_tokens * self.environment.max_turns

    def unused_fields(self) -> frozenset[str]:
        # What every run was before there were environments, or anything was kept, stays out of the key.
        unused = {"keep": self.keep == KeepConfig(), "environment": not self.has_environment}
        return frozenset(self.blocks) - {self.block} | {name for name, is_unused in unused.items() if is_unused}

    @property
    def keeps_best(self) -> bool:
        return self.validation is not None and self.validation.keep == "best"

    @property
    def validation_sets(self) -> Mapping[str, ValidationSet]:
        """By name, the main one first; empty without validation."""
        return self.validation.sets if self.validation is not None else {}

    @property
    def block(self) -> str:
        """Key of the chosen algorithm's block: `reinforce++-baseline` has `reinforce_plus_plus_baseline`."""
        return ALGORITHMS[self.algorithm].block

    @property
    def settings(self) -> AlgorithmConfig:
        """The block of the chosen algorithm."""
        return cast(AlgorithmConfig, self.blocks[self.block])

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy's own base with the adapter switched off."""
        kl = self.settings.kl
        return self.settings.uses_reference and self.lora is not None and kl.reference is None

    def engine_of(self, role: str) -> EngineConfig:
        """How the model of a role is run: `policy`, `reference`, `teacher`, `critic`, `reward:NAME` of reward NAME."""
        return self._engines()[role]

    def _engines(self) -> Mapping[str, EngineConfig]:
        settings = self.settings
        own = {"policy": self.engine, **{f"reward:{name}": r.engine for name, r in settings.model_rewards.items()}}
        if settings.uses_reference:
            own["reference"] = settings.kl.engine
        if settings.teacher is not None:
            own["teacher"] = settings.teacher.engine
        if settings.critic_settings is not None:
            own["critic"] = settings.critic_settings.engine
        return {role: engine or self.engine for role, engine in own.items()}

    @property
    def own_placements(self) -> Mapping[str, Placement]:
        """The frozen models that run in workers of their own, by role; all others are on the policy's."""
        settings = self.settings
        own = {f"reward:{name}": reward.placement for name, reward in settings.model_rewards.items()}
        if settings.uses_reference:
            own["reference"] = settings.kl.placement
        if settings.teacher is not None:
            own["teacher"] = settings.teacher.placement
        return {role: placement for role, placement in own.items() if placement is not None}

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def trains_adapter(self) -> bool:
        return self.lora is not None

    @property
    def checkpoints(self) -> CheckpointConfig:
        return self.checkpoint

    @property
    def served_lora(self) -> LoraConfig | None:
        """Of the adapters that are published; None where publishes bring the whole model, its adapter merged."""
        return None if self.rollout.merges_adapters else self.lora

    def reserves(self) -> Reservation:
        ranks, engines = self.placement.reserves(), super().reserves()
        shared = Reservation(gpus=-ranks.gpus) if self.hybrid else Reservation()  # the GPUs of both are the same
        return sum(self._own_reservations(), ranks + engines + shared)

    def _own_reservations(self) -> list[Reservation]:
        """One for each frozen model in workers of its own; rewards of one model, run in the same way, share it."""
        judges = {f"reward:{name}": reward.model for name, reward in self.settings.model_rewards.items()}
        distinct = {
            (role in judges, judges.get(role), self.engine_of(role), placement): placement
            for role, placement in self.own_placements.items()
        }
        return [placement.reserves() for placement in distinct.values()]

    def judges(self) -> Iterator[JudgedBy]:
        yield JudgedBy("environment", self.environment, "dataset")
        for name, reward in self.settings.rewards.items():
            yield JudgedBy(f"{self.block}.rewards.{name}", reward, "dataset")
        for name, monitor in self.monitors.items():
            yield JudgedBy(f"monitors.{name}", monitor, "dataset")
        for place, held_out in self._sets_by_place().items():
            for name, scorer in held_out.scorers.items():
                yield JudgedBy(f"{place}.scorers.{name}", scorer, f"{place}.dataset")

    def row_limit(self, dataset: str) -> RowLimit | None:
        for place, held_out in self._sets_by_place().items():
            if dataset == f"{place}.dataset" and held_out.sampling is not None:
                return self.prompt_limit(held_out.sampling, f"{place}.sampling")
        return super().row_limit(dataset)

    def _sets_by_place(self) -> Mapping[str, ValidationSet]:
        return {path_of_set(name): held_out for name, held_out in self.validation_sets.items()}

    def moe_coefficients(self) -> Mapping[str, float]:
        return {f"{self.block}.moe_coefficient": self.settings.moe_coefficient}
