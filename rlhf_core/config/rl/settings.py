"""Settings of the RL stage and the properties derived from them; checks between settings are in stage.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field

from rlhf_core.config.base import Config, Dtype, KeyedConfig, Reads, Role, operational, since_default
from rlhf_core.config.engines.placement import ModelPlacement, Placement, Reservation
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.environments.environments import AnyEnvironment, SingleTurn
from rlhf_core.config.numbers import BatchSize, EMADecay, Steps, Tolerance
from rlhf_core.config.plugins import Plugin
from rlhf_core.config.rewards.scorers import MonitorConfig
from rlhf_core.config.rl.algorithm_table import ALGORITHMS, known_algorithm
from rlhf_core.config.rl.algorithms import AlgorithmConfig
from rlhf_core.config.rl.asynchronous import AsynchronousConfig
from rlhf_core.config.rl.critic import POLICY_START
from rlhf_core.config.rl.difficulty import ReplayConfig, SelectConfig
from rlhf_core.config.rl.groups import reservations, workers_of
from rlhf_core.config.rl.keep import KeepConfig, LogRolloutsConfig
from rlhf_core.config.stages.base import EnginesConfig, HeldModel, JudgedBy, Quantisation, RowLimit
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.config.stages.validation import ValidationConfig, ValidationSet, path_of_set

POLICY_INPUT = "model"  # the input that the policy starts from


class RLSettings(EnginesConfig, KeyedConfig):
    """The settings and their properties; RLConfig adds checks between them."""

    algorithm: Annotated[str, AfterValidator(known_algorithm)] = Field(
        description="the algorithm, whose block is used; the other blocks are ignored",
        json_schema_extra=lambda schema: schema.update(enum=[*ALGORITHMS]),
    )
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the initial model; none: the last one above that makes a model"
    )
    dataset: Annotated[str, Reads("dataset", format="prompts")] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    steps: Steps = Field(description="number of rollout-and-update steps")
    prompts_per_step: BatchSize = Field(description="prompts per step, each answered `group_size` times")
    sampling: SamplingConfig = Field(description="sampling settings of the rollouts")
    environment: AnyEnvironment = since_default(
        SingleTurn(), description="the environment of an episode; default: one reply"
    )
    asynchronous: AsynchronousConfig | None = Field(
        default=None, description="sample beside training; none: each step samples with the weights of the last one"
    )
    select: SelectConfig | None = since_default(
        None, description="choice of prompts by their pass rates; none: all, in a random order"
    )
    replay: ReplayConfig | None = since_default(
        None, description="replay of groups with mixed outcomes; none: each group is trained on in one step"
    )
    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")
    dropout: bool = Field(
        default=False,
        description="update policy and critic with the dropout and router noise of their config.json and of an "
        "adapter: the updated policy then differs from the one that sampled",
    )
    engine: EngineConfig = Field(
        default=EngineConfig(), description="engine settings of the policy, and of each model without its own"
    )
    ema_decay: EMADecay | None = Field(
        default=None,
        description="decay, below 1, of an exponential moving average of the trained weights over optimizer steps, "
        "which is validated and is the stage's result; none: the weights themselves",
    )
    validation: ValidationConfig | None = Field(
        default=None, description="validation on held-out prompts during training; none: the result is the last weights"
    )
    keep: KeepConfig = since_default(KeepConfig(), description="artifacts kept of single steps")
    log_rollouts: LogRolloutsConfig | None = operational(
        LogRolloutsConfig(), description="a sample of the rollouts, logged for `alignment ui`; none: nothing is logged"
    )
    placement: Placement = operational(Placement, description="resources of the training workers")
    hybrid: bool = operational(
        False, description="workers and engines time-share their devices instead of using twice as many"
    )
    checkpoint: CheckpointConfig = operational(
        CheckpointConfig, description="interval of checkpoints, from which a killed job resumes"
    )
    monitors: dict[str, MonitorConfig] = operational(
        dict, description="scores that are logged at each step and never trained on"
    )
    probe_tolerance: Tolerance | None = Field(
        default=None,
        description="maximum mean |log-prob difference| of engine and trainer on the probe; none: by dtype",
    )

    @property
    def text_readers(self) -> tuple[str, ...]:
        """Settings that read text only, without the images of prompts."""
        settings = self.settings
        teacher = settings.teacher
        return (f"{self.block}.teacher.hint",) if teacher is not None and teacher.hint is not None else ()

    def text_readers_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        environment = self.environment.of_row(row)
        return self.text_readers if environment.reads_images else (*self.text_readers, "environment")

    @classmethod
    def block_class(cls, key: str, raw: Any) -> type[Config] | None:
        return next((entry.config for entry in ALGORITHMS.values() if entry.block == key), None)

    @classmethod
    def block_names(cls) -> list[str]:
        return [entry.block for entry in ALGORITHMS.values()]

    def named_plugins(self) -> Iterable[Plugin]:
        plugin = ALGORITHMS.plugins.get(self.algorithm)
        return () if plugin is None else (plugin,)

    @property
    def has_environment(self) -> bool:
        return self.environment != SingleTurn()

    @property
    def max_lag(self) -> int:
        """Maximum number of steps between the weights that sampled a token and those that are trained on it."""
        return self.asynchronous.max_lag if self.asynchronous is not None else 0

    @property
    def max_age(self) -> int:
        """Maximum number of steps between the sampling of trajectories and the step that trains on them."""
        return max(self.max_lag, 0 if self.replay is None else self.replay.max_age)

    @property
    def in_flight(self) -> int:
        """Maximum number of prompts being sampled, judged or waiting, if sampling runs beside training."""
        assert self.asynchronous is not None
        return self.asynchronous.in_flight or (self.max_lag + 1) * self.prompts_per_step

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum number of sampled tokens in one episode."""
        return self.sampling.max_tokens * self.environment.most_turns

    def unused_fields(self) -> frozenset[str]:
        blocks = self.blocks.keys() - {self.block}
        return super().unused_fields() | blocks | (set() if self.max_lag else {"asynchronous"})

    @property
    def keeps_best(self) -> bool:
        return self.validation is not None and self.validation.keep == "best"

    @property
    def validation_sets(self) -> Mapping[str, ValidationSet]:
        """Validation sets by name, the main one first; empty without validation."""
        return self.validation.sets if self.validation is not None else {}

    @property
    def block(self) -> str:
        """Key of the chosen algorithm's block: `reinforce_plus_plus_baseline` for `reinforce++-baseline`."""
        return ALGORITHMS[self.algorithm].block

    @property
    def settings(self) -> AlgorithmConfig:
        """The block of the chosen algorithm."""
        return cast(AlgorithmConfig, self.blocks[self.block])

    @property
    def reference_is_base(self) -> bool:
        """True if the reference is the policy's own base with the adapter switched off."""
        kl = self.settings.kl
        return self.settings.uses_reference and self.lora is not None and kl.reference is None

    def reward_input(self, reward: str) -> str:
        """Return the input with a reward's model."""
        return f"{self.block}.rewards.{reward}.model"

    @property
    def reference_input(self) -> str:
        """The input with the reference's initial model."""
        return POLICY_INPUT if self.settings.kl.reference is None else f"{self.block}.kl.reference"

    @property
    def teacher_input(self) -> str:
        """The input with the teacher's initial model."""
        return f"{self.block}.teacher.model"

    @property
    def critic_input(self) -> str:
        """The input with the critic's initial model."""
        critic = self.settings.critic_settings
        assert critic is not None
        if critic.start is None:
            # By name, not as written: a stage key knows no order of the rewards.
            return min((self.reward_input(reward) for reward in self.settings.model_rewards), default=POLICY_INPUT)
        return POLICY_INPUT if critic.start == POLICY_START else f"{self.block}.critic.start"

    @property
    def token_readers(self) -> Mapping[str, tuple[str, str]]:
        """Models that read the policy's tokens, without reward models, which tokenise text themselves."""
        readers = {}
        if self.settings.uses_reference:
            readers["kl.reference"] = self.reference_input, "name another model, or remove it"
        if self.settings.teacher is not None:
            readers["teacher.model"] = self.teacher_input, "name another model"
        if self.settings.critic_settings is not None:
            readers["critic.start"] = self.critic_input, "set critic.start: policy"
        return {f"{self.block}.{setting}": reader for setting, reader in readers.items() if reader[0] != POLICY_INPUT}

    def engine_of(self, role: str) -> EngineConfig:
        """Return the engine settings of a role: `policy`, `reference`, `teacher`, `critic`, `reward:NAME` of reward
        NAME.
        """
        return self.engines_by_role()[role]

    def engines_by_role(self) -> Mapping[str, EngineConfig]:
        settings = self.settings
        engines = {"policy": self.engine, **{f"reward:{name}": r.engine for name, r in settings.model_rewards.items()}}
        if settings.uses_reference:
            engines["reference"] = settings.kl.engine
        if settings.teacher is not None:
            engines["teacher"] = settings.teacher.engine
        if settings.critic_settings is not None:
            engines["critic"] = settings.critic_settings.engine
        return {role: engine or self.engine for role, engine in engines.items()}

    @property
    def own_placements(self) -> Mapping[str, ModelPlacement]:
        """Placements of the models apart from the policy's workers, by role; all others run on these."""
        settings = self.settings
        placements = {f"reward:{name}": reward.placement for name, reward in settings.model_rewards.items()}
        if settings.uses_reference:
            placements["reference"] = settings.kl.placement
        if settings.teacher is not None:
            placements["teacher"] = settings.teacher.placement
        if settings.critic_settings is not None:
            placements["critic"] = settings.critic_settings.placement
        return {role: placement for role, placement in placements.items() if placement is not None}

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def adapter_targets(self) -> Literal["all-linear"] | tuple[str, ...] | None:
        return None if self.lora is None else self.lora.target_modules

    @property
    def model_dtype(self) -> Dtype:
        return self.engine.dtype

    def num_steps(self, rows: int | None) -> int:
        return self.steps

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        """The models on the policy's workers, and on those of each group."""
        settings, critic = self.settings, self.settings.critic_settings
        starts = {f"reward:{name}": self.reward_input(name) for name in settings.model_rewards}
        if settings.uses_reference and not self.reference_is_base:
            starts["reference"] = self.reference_input
        if settings.teacher is not None:
            starts["teacher"] = self.teacher_input
        held = {"policy": self._trained(POLICY_INPUT, "policy", self.lora)}
        held |= {
            role: HeldModel(start, self.engine_of(role), self._placement_of(role)) for role, start in starts.items()
        }
        held |= {} if critic is None else {"critic": self._trained(self.critic_input, "critic", critic.lora)}
        together: dict[str, list[HeldModel]] = {}
        for role, model in held.items():
            together.setdefault(workers_of(role, self.own_placements.get(role)), []).append(model)
        return tuple(together.values())

    def _trained(self, start: str, role: str, lora: LoraConfig | None) -> HeldModel:
        rank, quantised = (None, False) if lora is None else (lora.rank, lora.quantised is not None)
        placement = self._placement_of(role)
        return HeldModel(start, self.engine_of(role), placement, True, adapter_rank=rank, quantised=quantised)

    def _placement_of(self, role: str) -> Placement:
        return self.own_placements.get(role, self.placement)

    @property
    def quantised(self) -> Quantisation | None:
        return None if self.lora is None else self.lora.quantised

    @property
    def checkpoints(self) -> CheckpointConfig:
        return self.checkpoint

    @property
    def served_lora(self) -> LoraConfig | None:
        """Settings of the adapters that are published; None if merged weights are published."""
        merges = self.rollout.merges_adapters or (self.lora is not None and self.lora.merged_only is not None)
        return None if merges else self.lora

    @property
    def publishes_on_gpus(self) -> bool:
        """True if ranks and engines both have GPUs, between which rollout.transport collective and ipc send weights."""
        return bool(self.placement.gpus_per_worker and self.rollout.gpus_per_engine)

    @property
    def sending_ranks(self) -> int:
        """Ranks that send weights: the first or, by handle, each to the engine on its device."""
        return self.placement.workers if self.hybrid and self.rollout.transport == "ipc" else 1

    @property
    def receivers_per_engine(self) -> int:
        """Processes of an engine that receive weights: its workers or, of an adapter, the one that manages these."""
        return self.rollout.workers_per_engine if self.served_lora is None else 1

    def reserves(self) -> Reservation:
        return sum(self._reservations().values(), Reservation())

    def reservations(self) -> Mapping[str, Reservation]:
        return self._reservations() if self.own_placements else {}

    def _reservations(self) -> Mapping[str, Reservation]:
        judges = {f"reward:{name}": reward.model for name, reward in self.settings.model_rewards.items()}
        models = {role: (role in judges, judges.get(role), self.engine_of(role)) for role in self.own_placements}
        apart = {role: (placement, models[role]) for role, placement in self.own_placements.items()}
        return reservations(self.placement, self.rollout, apart, hybrid=self.hybrid)

    def judges(self) -> Iterator[JudgedBy]:
        yield JudgedBy("environment", self.environment, "dataset")
        for name, reward in self.settings.rewards.items():
            yield JudgedBy(f"{self.block}.rewards.{name}", reward, "dataset")
        for name, monitor in self.monitors.items():
            yield JudgedBy(f"monitors.{name}", monitor, "dataset")
        for place, held_out in self.sets_by_place().items():
            for name, scorer in held_out.scorers.items():
                yield JudgedBy(f"{place}.scorers.{name}", scorer, f"{place}.dataset")

    def row_limit(self, dataset: str) -> RowLimit | None:
        for place, held_out in self.sets_by_place().items():
            if dataset == f"{place}.dataset" and held_out.sampling is not None:
                return self.prompt_limit(held_out.sampling, f"{place}.sampling")
        return super().row_limit(dataset)

    def sets_by_place(self) -> Mapping[str, ValidationSet]:
        return {path_of_set(name): held_out for name, held_out in self.validation_sets.items()}

    def moe_coefficients(self) -> Mapping[str, float]:
        return {f"{self.block}.moe_coefficient": self.settings.moe_coefficient}
