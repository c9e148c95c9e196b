"""Settings of the RL stage. `algorithm` chooses one of the algorithm blocks; the others are not part of the result."""

from __future__ import annotations

from pydantic import model_validator

from rlhf_core.config.engines.training import SHARED_BY_RANKS
from rlhf_core.config.environments.environments import require_concurrent
from rlhf_core.config.numbers import MOST_COMPLETIONS, MOST_KEPT
from rlhf_core.config.rewards.rewards import require_environment
from rlhf_core.config.rl.difficulty_checks import require_replayable, require_scores
from rlhf_core.config.rl.group_checks import require_equal_draws, require_groups
from rlhf_core.config.rl.settings import RLSettings
from rlhf_core.config.rl.transport import require_transport
from rlhf_core.config.stages.trained import (
    require_adaptable,
    require_compatible,
    require_devices,
    require_dropout,
    require_examples,
    require_same_ranks,
)
from rlhf_core.config.stages.validation import path_of_set


class RLConfig(RLSettings):
    """`algorithm` chooses one of the algorithm blocks; the others are ignored."""

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
        require_examples(examples, what, self.engine, self.placement)
        return self

    @model_validator(mode="after")
    def _devices_run_the_engines(self) -> RLConfig:
        engines, apart = self.engines_by_role(), self.own_placements
        require_same_ranks(self.engine, {role: engine for role, engine in engines.items() if role not in apart})
        for role, engine in engines.items():
            require_devices(engine, apart.get(role, self.placement))
        return self

    @model_validator(mode="after")
    def _models_of_a_group_share_its_workers(self) -> RLConfig:
        require_groups(self)
        require_equal_draws(self)
        return self

    @model_validator(mode="after")
    def _engines_serve_the_adapter(self) -> RLConfig:
        if self.lora is not None and "lm_head" in self.lora.target_modules:
            raise ValueError("lora.target_modules names lm_head, whose adapters the engines cannot serve; remove it")
        setting = None if self.lora is None else self.lora.merged_only
        if setting is not None and self.rollout.serve_adapter == "adapter":
            raise ValueError(
                f"rollout.serve_adapter is adapter, but vLLM does not serve adapters with lora.{setting}; set merged"
            )
        return self

    @model_validator(mode="after")
    def _base_may_be_quantised(self) -> RLConfig:
        critic = self.settings.critic_settings
        if critic is not None and critic.lora is not None and critic.lora.quantised is not None:
            raise ValueError(f"{self.block}.critic.lora.quantised: only the policy's base is quantised; remove it")
        if self.quantised is not None and self.hybrid:
            raise ValueError("lora.quantised: with hybrid the base would leave the device and return, which was not "
                             "tested for packed weights; remove one of them")  # fmt: skip
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
        require_adaptable(self.engine_of("policy"), lora=self.lora)
        if (critic := self.settings.critic_settings) is not None:
            require_compatible(self.engine_of("critic"), critic.optimizer)
            require_adaptable(self.engine_of("critic"), **{f"{self.block}.critic.lora": critic.lora})
        return self

    @model_validator(mode="after")
    def _reference_settings_are_used(self) -> RLConfig:
        kl = self.settings.kl
        changed = {"engine": kl.engine is not None, "offload": kl.offload, "placement": kl.placement is not None}
        setting = next((name for name, is_set in changed.items() if is_set), None)
        if self.reference_is_base and setting is not None:
            raise ValueError(
                f"{self.block}.kl.{setting}: with `lora` the reference is the policy's base with its adapter off, and "
                "has no weights of its own; remove it, or name a model as kl.reference"
            )
        return self

    @model_validator(mode="after")
    def _reference_rounds_as_the_policy(self) -> RLConfig:
        if not self.settings.uses_reference:
            return self
        policy, reference = self.engine_of("policy"), self.engine_of("reference")
        for name in ("dtype", "attention", *SHARED_BY_RANKS):
            policy_value, reference_value = getattr(policy, name), getattr(reference, name)
            if policy_value != reference_value:
                raise ValueError(
                    f"{self.block}.kl.engine.{name} is {reference_value}, but the policy's is {policy_value}: "
                    "rounding would count as KL, so the KL of the policy to itself would not be 0; set both alike"
                )
        return self

    @model_validator(mode="after")
    def _validation_has_room(self) -> RLConfig:
        for place, held_out in self.sets_by_place().items():
            sampling = held_out.sampling
            if sampling is not None and sampling.max_tokens >= self.rollout.max_length:
                raise ValueError(f"{place}.sampling.max_tokens leaves no room for a prompt in rollout.max_length")
        return self

    @model_validator(mode="after")
    def _devices_can_be_shared(self) -> RLConfig:
        if not self.hybrid:
            return self
        placement, rollout = self.placement, self.rollout
        if self.engine.tensor_parallel > 1:
            raise ValueError(
                "hybrid: weights that workers share (engine.tensor_parallel) were not tested on devices that engines "
                "use too; remove one of them"
            )
        spread = rollout.workers_per_engine
        if placement.workers != rollout.engines * spread:
            raise ValueError(
                f"hybrid: each worker shares its device with an engine, but there are placement.workers="
                f"{placement.workers} and {rollout.engines * spread} devices of engines (rollout.engines="
                f"{rollout.engines} x {spread}); set equal numbers"
            )
        if rollout.gpus_per_engine != spread * placement.gpus_per_worker or placement.gpus_per_worker > 1:
            raise ValueError(
                f"hybrid: placement.gpus_per_worker={placement.gpus_per_worker:g} and rollout.gpus_per_engine="
                f"{rollout.gpus_per_engine:g} are not the same GPUs; set 1 and {spread}, or 0 and 0"
            )
        on_ranks = [engine for role, engine in self.engines_by_role().items() if role not in self.own_placements]
        if any(engine.offload_parameters for engine in on_ranks):
            raise ValueError("hybrid: engine.offload_parameters keeps the weights in host memory already; remove it")
        if any(engine.hpz_partition_size is not None for engine in on_ranks):
            raise ValueError("hybrid: engine.hpz_partition_size would leave its copy of the weights on the device that "
                             "the engine is lent; remove it")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _weights_can_travel(self) -> RLConfig:
        require_transport(self.placement, self.rollout, hybrid=self.hybrid, adapters=self.served_lora is not None)
        return self

    @model_validator(mode="after")
    def _sampling_may_run_beside_training(self) -> RLConfig:
        if self.asynchronous is None or not self.max_lag:
            return self
        if self.in_flight < self.prompts_per_step:
            raise ValueError(
                f"asynchronous.in_flight is {self.in_flight}, less than the {self.prompts_per_step} prompts of a step "
                "(prompts_per_step)"
            )
        if self.rollout.repeatable:
            raise ValueError("asynchronous sampling is not reproducible: set rollout.repeatable: false")
        if self.hybrid:
            raise ValueError("asynchronous: with hybrid, engines sleep while the ranks train; remove one of them")
        if self.asynchronous.publish == "in_flight" and self.served_lora is not None:
            raise ValueError(
                "asynchronous.publish is in_flight, but a reply continues with the adapter that it was begun with: set "
                "asynchronous.publish: between_replies, or rollout.serve_adapter: merged"
            )
        if self.validation is not None and self.ema_decay is not None:
            raise ValueError(
                "asynchronous: a validation of the moving average (ema_decay) would publish it to engines that sample "
                "what is trained on; remove one of them"
            )
        filtering = self.settings.filtering
        if filtering is not None and filtering.oversampling != 1:
            raise ValueError(
                f"asynchronous: {self.block}.filtering.oversampling has no effect, since sampling never waits for a "
                "step; raise asynchronous.in_flight instead"
            )
        example = self.settings.mismatch_example
        if example is not None and "mismatch" not in self.settings.model_fields_set:
            raise ValueError(
                f"asynchronous: completions are up to max_lag={self.max_lag} updates older than the weights that are "
                f"trained on them, and nothing corrects for it: give {self.block}.mismatch, such as "
                f"{example}, or, to train on them as they are, {self.block}.mismatch: null"
            )
        for name, reward in self.settings.model_rewards.items():
            if reward.placement is None:
                raise ValueError(
                    f"asynchronous: {self.block}.rewards.{name} is a reward model on the policy's ranks, which train "
                    "while completions are judged; give it workers of its own (`placement`)"
                )
        return self

    @model_validator(mode="after")
    def _difficulty_is_known(self) -> RLConfig:
        require_scores(self)
        require_replayable(self)
        return self

    @model_validator(mode="after")
    def _rollouts_explore(self) -> RLConfig:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy rollouts of one prompt are all the same; use 1.0")
        if self.sampling.truncation and not 0 < self.sampling.top_k <= MOST_KEPT:
            raise ValueError(
                f"sampling.{self.sampling.truncation[0]}: RL stores the tokens that were kept at each position, since "
                f"its log-probs are of these alone, and top_k bounds them: set sampling.top_k, from 1 to {MOST_KEPT}"
            )
        if self.sampling.top_k == 1:
            raise ValueError("sampling.top_k is 1: rollouts of one prompt are all the same; set 2 or more")
        if self.sampling.max_tokens >= self.rollout.max_length:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in rollout.max_length="
                f"{self.rollout.max_length}: raise the latter, or lower the former"
            )
        return self

    @model_validator(mode="after")
    def _environment_gives_rewards(self) -> RLConfig:
        if not self.has_environment:
            require_environment(self.settings.rewards, f"{self.block}.rewards")
            require_environment(self.monitors, "monitors")
            for name, settings in self.validation_sets.items():
                require_environment(settings.scorers, f"{path_of_set(name)}.scorers")
        return self

    @model_validator(mode="after")
    def _programs_need_not_wait(self) -> RLConfig:
        require_concurrent(self.environment, self.rollout)
        return self

    @model_validator(mode="after")
    def _hinted_episodes_have_room(self) -> RLConfig:
        teacher = self.settings.teacher
        if teacher is not None and teacher.hint is not None and self.has_environment:
            raise ValueError(
                f"{self.block}.teacher.hint: the turns of an environment may fill rollout.max_length, and leave no "
                "room for a hint; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _rollouts_are_completions(self) -> RLConfig:
        several = self.environment.most_turns > 1 or self.environment.is_program
        if self.keep.rollouts_every is not None and several:
            raise ValueError(
                "keep.rollouts_every: rollouts are kept as completions of prompts, and an episode of several turns is "
                "none; remove it"
            )
        return self
