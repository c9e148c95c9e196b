"""Settings shared by every stage that trains: optimizer, precision, sharding, adapters, placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Dtype, Reads, Role, operational, since_default
from rlhf_core.config.engines.placement import Placement, Reservation
from rlhf_core.config.engines.training import SHARED_BY_RANKS, EngineConfig
from rlhf_core.config.numbers import (
    AdamEpsilon,
    BatchSize,
    Beta,
    Coefficient,
    Decay,
    Dropout,
    Epochs,
    GradientNorm,
    Iterations,
    LearningRate,
    LoraAlpha,
    LoraRank,
    Processes,
    Share,
    Steps,
    TrainedTokens,
    WeightDecay,
)
from rlhf_core.config.stages.base import HeldModel, NamedStageConfig, Quantisation, RowLimit, SeededConfig
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.validation import SupervisedValidationConfig
from rlhf_core.config.texts import NonEmpty


class MuonConfig(Config):
    """Momentum with matrices orthogonalised by Newton-Schulz iterations, arXiv:2502.16982."""

    momentum: Decay = Field(default=0.95, description="decay of the mean of the gradient")
    nesterov: bool = Field(default=True, description="use Nesterov momentum")
    ns_steps: Iterations = Field(default=5, description="number of Newton-Schulz iterations")
    scale: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="scale of an update by its matrix's shape (A, B): 0.2 sqrt(max(A, B)), which suits AdamW's "
        "learning rate, or sqrt(max(1, A / B))",
    )
    adamw_learning_rate: LearningRate | None = Field(
        default=None, description="learning rate of the weights trained by AdamW; none: the same"
    )


class OptimizerConfig(Config):
    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon trains the matrices of the hidden layers; AdamW embeddings, heads, vectors, stacked experts",
    )
    muon: MuonConfig | None = Field(default=None, description="settings of Muon; none: its defaults")
    learning_rate: LearningRate = Field(description="maximum learning rate, after the warm-up")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), description="decay of the mean and of the square of the gradient"
    )
    epsilon: AdamEpsilon = since_default(
        1e-8, description="added to the root of AdamW's mean square, by which an update is divided"
    )
    weight_decay: WeightDecay = Field(default=0.0, description="decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="schedule of the learning rate after the warm-up"
    )
    warmup_share: Share = Field(default=0.05, description="share of the steps with a rate rising from zero")
    final_learning_rate_share: Share = Field(default=0.1, description="final rate, as a share of the maximum")
    max_gradient_norm: GradientNorm | None = Field(
        default=1.0, description="maximum norm of the gradient, to which longer ones are scaled down; none: never"
    )
    max_skipped_updates: Steps = operational(
        3, description="number of consecutive updates skipped for a non-finite gradient that ends the run"
    )

    @model_validator(mode="after")
    def _settings_are_used(self) -> OptimizerConfig:
        if self.learning_rate * self.weight_decay >= 1:
            raise ValueError(
                f"learning_rate={self.learning_rate:g} x weight_decay={self.weight_decay:g} is 1 or more: one "
                "step would decay the weights to 0 or beyond; lower one of them"
            )
        unfallen = type(self).model_fields["final_learning_rate_share"].default
        if self.schedule == "constant" and self.final_learning_rate_share != unfallen:
            raise ValueError(
                f"final_learning_rate_share is {self.final_learning_rate_share:g}, but the schedule is constant, which "
                "never falls; remove it, or set `schedule: linear` or cosine"
            )
        if self.muon is not None and self.name != "muon":
            raise ValueError(f"there is a block `muon`, but the optimizer is {self.name}; set `name: muon`")
        return self

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.name == "muon" else frozenset({"muon"})


class LoraConfig(Config):
    rank: LoraRank = Field(description="rank of the adapter's matrices")
    alpha: LoraAlpha = Field(default=32.0, description="the adapter's output is scaled by alpha / rank")
    dropout: Dropout = Field(default=0.0, description="dropout before the adapter")
    target_modules: Literal["all-linear"] | Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = Field(
        default="all-linear",
        description="names of the layers that get an adapter; in a mixture-of-experts model all-linear leaves out the "
        "blocks of experts, which engines cannot serve with adapters",
    )
    dora: bool = since_default(
        False,
        description="also train the norm of each row of the adapted weights, arXiv:2402.09353; needs a "
        "zero_stage below 3",
    )
    rank_stabilised: bool = since_default(
        False, description="scale the adapter's output by alpha / sqrt(rank), arXiv:2312.03732"
    )
    modules_to_save: tuple[NonEmpty, ...] = since_default(
        (),
        description="names of modules that are trained in full beside the adapter, such as embed_tokens, and saved "
        "with it; needs a zero_stage below 3",
    )

    quantised: Quantisation | None = since_default(
        None,
        description="quantisation of the frozen linear layers (QLoRA), arXiv:2305.14314: nf4 takes 4.5 bits a "
        "weight in training; engines and merges get the dequantised values; needs a zero_stage below 3",
    )

    @property
    def scaling(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    @property
    def merged_only(self) -> str | None:
        """The setting with which vLLM cannot serve the adapter itself; None if it can."""
        return "dora" if self.dora else "modules_to_save" if self.modules_to_save else None


def require_devices(engine: EngineConfig, placement: Placement) -> None:
    """Raise ValueError if the workers, or their devices, cannot run the engine."""
    if engine.attention in ("flex", "flash_attention_2") and placement.gpus_per_worker == 0:
        raise ValueError(
            f"engine.attention {engine.attention} needs a GPU, but placement.gpus_per_worker is 0; set 1, or use sdpa"
        )
    if engine.hpz_partition_size is not None and placement.workers % engine.hpz_partition_size:
        raise ValueError(
            f"placement.workers={placement.workers} is not a multiple of engine.hpz_partition_size="
            f"{engine.hpz_partition_size}: set that to the workers of a node, or remove it"
        )
    if placement.workers % engine.sequence_parallel:
        raise ValueError(
            f"placement.workers={placement.workers} is not a multiple of engine.sequence_parallel="
            f"{engine.sequence_parallel}, the workers that share a sequence: change one of them"
        )
    if placement.workers % engine.ranks_of_replica:
        others = f" x sequence_parallel={engine.sequence_parallel}" if engine.sequence_parallel > 1 else ""
        raise ValueError(
            f"placement.workers={placement.workers} is not a multiple of engine.tensor_parallel="
            f"{engine.tensor_parallel}{others}, the workers that share a layer's weights: change one of them"
        )


def require_adaptable(engine: EngineConfig, **adapters: LoraConfig | None) -> None:
    """Raise ValueError if the engine cannot train an adapter, passed under its setting's name."""
    for name, adapter in adapters.items():
        if adapter is None:
            continue
        if engine.tensor_parallel > 1:
            raise ValueError(
                f"{name}: adapters were not tested on weights that workers share (engine.tensor_parallel); remove one"
            )
        setting = adapter.merged_only
        if setting is not None and engine.zero_stage == 3:
            raise ValueError(
                f"{name}.{setting} reads weights of the model beside their own layer, where zero_stage 3 has sharded "
                "them; set engine.zero_stage 2, or remove it"
            )
        if adapter.quantised is None:
            continue
        if engine.zero_stage == 3:
            raise ValueError(
                f"{name}.quantised packs two weights into a byte, apart from their factors, which zero_stage 3 would "
                "cut; set engine.zero_stage 2"
            )
        if engine.compiled:
            raise ValueError(f"{name}.quantised was not tested with engine.compiled; remove one of them")


def require_same_ranks(engine: EngineConfig, others: Mapping[str, EngineConfig]) -> None:
    """Raise ValueError unless replicas of all models on the same workers have as many. others: by what they are."""
    for (name, other), setting in product(others.items(), SHARED_BY_RANKS):
        ours, theirs = getattr(engine, setting), getattr(other, setting)
        if ours != theirs:
            raise ValueError(
                f"engine.{setting} is {ours}, but {theirs} in the engine of the {name}, on the same workers; set both "
                "alike"
            )


def require_examples(examples: int, what: str, engine: EngineConfig, placement: Placement) -> None:
    """Raise ValueError if some workers would never have an example."""
    if examples * engine.ranks_of_replica < placement.workers:
        shared = {name: getattr(engine, name) for name in SHARED_BY_RANKS}
        raise ValueError(
            f"{what} is {examples}, fewer than placement.workers={placement.workers}"
            + "".join(f" / engine.{name}={ranks}" for name, ranks in shared.items() if ranks > 1)
            + ": some would always be idle; raise the one or lower the other"
        )


def require_compatible(engine: EngineConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError if the engine cannot run the optimizer exactly."""
    if engine.tensor_parallel > 1 and optimizer.name == "muon":
        raise ValueError(
            "optimizer.name muon needs whole matrices, which the workers of engine.tensor_parallel share; use adamw"
        )
    if engine.offload_optimizer and optimizer.name == "muon":
        raise ValueError(
            "optimizer.name muon does not work with engine.offload_optimizer: its matrix products would run in main "
            "memory; leave the optimizer's state on the device, or use adamw"
        )


def require_dropout(used: bool, **adapters: LoraConfig | None) -> None:
    """Raise ValueError if an adapter, passed under its setting's name, has a dropout that is not used."""
    for name, adapter in adapters.items():
        if adapter is not None and adapter.dropout > 0 and not used:
            raise ValueError(
                f"{name}.dropout is {adapter.dropout:g}, but `dropout` is false, which switches all dropout off: set "
                "`dropout: true`, or remove it from the adapter"
            )


class RanksConfig(NamedStageConfig):
    """A stage whose ranks read the sequences of one dataset, which each subclass declares with its format."""

    dataset: str
    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the initial model; none: the last one above that makes a model"
    )
    max_length: TrainedTokens = Field(description="maximum sequence length in tokens; a longer one is an error")
    engine: EngineConfig = Field(default=EngineConfig(), description="engine settings of the model")
    placement: Placement = operational(Placement, description="resources of its workers")
    processes: Processes = operational(
        1, description="processes that tokenise its datasets before its workers start; CPUs are not reserved for them"
    )

    def reserves(self) -> Reservation:
        return self.placement.reserves()

    def sequence_lengths(self) -> Mapping[str, int]:
        return {"max_length": self.max_length}

    def row_limit(self, dataset: str) -> RowLimit | None:
        return RowLimit("max_length", self.max_length)

    @model_validator(mode="after")
    def _devices_run_the_engine(self) -> Self:
        require_devices(self.engine, self.placement)
        return self


class SupervisedConfig(SeededConfig, RanksConfig):
    """Training for some epochs over one dataset. Each subclass declares `validation` with its format, too."""

    LABELLED: ClassVar[str] = "row has the label"  # what has one of `labels`
    SMALLEST_STEP: ClassVar[int] = 1  # examples that the loss of a step needs

    validation: SupervisedValidationConfig | None = None
    epochs: Epochs = Field(default=1, description="number of passes over the dataset")
    max_steps: Steps | None = Field(default=None, description="maximum number of optimizer steps; none: all epochs")
    batch_size: BatchSize = Field(description="sequences per optimizer step, over all workers")
    optimizer: OptimizerConfig = Field(description="optimizer of the weights")
    moe_coefficient: Coefficient = Field(
        default=0.0, description="weight of a mixture-of-experts model's load-balancing loss"
    )
    dropout: bool = Field(
        default=True,
        description="train with the dropout and router noise of the model's config.json, and with that of an adapter",
    )
    log_every: Steps = operational(10, description="interval of metrics, in steps")
    checkpoint: CheckpointConfig = operational(
        CheckpointConfig, description="interval of checkpoints, from which a killed job resumes"
    )

    @model_validator(mode="after")
    def _dropout_is_used(self) -> SupervisedConfig:
        require_dropout(self.dropout, lora=self.adapter)
        return self

    @model_validator(mode="after")
    def _engine_runs_the_optimizer(self) -> SupervisedConfig:
        require_compatible(self.engine, self.optimizer)
        require_adaptable(self.engine, lora=self.adapter)
        return self

    @model_validator(mode="after")
    def _workers_have_examples(self) -> SupervisedConfig:
        require_examples(self.batch_size, "batch_size", self.engine, self.placement)
        return self

    def unused_fields(self) -> frozenset[str]:
        return super().unused_fields() | (frozenset({"validation"}) if self.validation is None else frozenset())

    def steps_of_epoch(self, num_examples: int) -> int:
        """Return the steps of an epoch; the last takes the remaining examples, or if too few the one before does."""
        whole, left = divmod(num_examples, self.batch_size)
        return whole + (left >= self.SMALLEST_STEP) if whole else min(left, 1)

    def count_steps(self, num_examples: int) -> int:
        """Return the optimizer steps of the run: those of its epochs, but at most `max_steps`."""
        steps = self.epochs * self.steps_of_epoch(num_examples)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def num_steps(self, rows: int | None) -> int | None:
        return None if rows is None else self.count_steps(max(rows, 0))

    def rows_read(self, rows: int) -> int | None:
        steps = self.num_steps(rows)
        return None if steps is None else min(rows * self.epochs, steps * self.batch_size)

    @property
    def model_dtype(self) -> Dtype:
        return self.engine.dtype

    @property
    def frozen_models(self) -> Mapping[str, EngineConfig]:
        """Engine settings of each frozen model of a worker, by its input."""
        return {}

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        rank = None if self.adapter is None else self.adapter.rank
        quantised = self.quantised is not None
        trained = HeldModel("model", self.engine, self.placement, True, adapter_rank=rank, quantised=quantised)
        frozen = [HeldModel(start, engine, self.placement) for start, engine in self.frozen_models.items()]
        return ((trained, *frozen),)

    @property
    def adapter(self) -> LoraConfig | None:
        """Settings of the adapter that is trained; None: all weights are trained."""
        return None

    @property
    def quantised(self) -> Quantisation | None:
        return None if self.adapter is None else self.adapter.quantised

    @property
    def keeps_best(self) -> bool:
        return self.validation is not None and self.validation.keep == "best"

    @property
    def checkpoints(self) -> CheckpointConfig:
        return self.checkpoint

    def one_label(self, label: float) -> str:
        """Return the reason why a dataset with only this label teaches nothing."""
        return f"every {self.LABELLED} {label:g}, so there is nothing to tell apart: add rows with another"

    def moe_coefficients(self) -> Mapping[str, float]:
        return {"moe_coefficient": self.moe_coefficient}


class SupervisedPolicyConfig(SupervisedConfig):
    """Supervised training of a policy, or of an adapter."""

    lora: LoraConfig | None = Field(default=None, description="train an adapter; none: all weights")

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora

    @property
    def adapter_targets(self) -> Literal["all-linear"] | tuple[str, ...] | None:
        return None if self.lora is None else self.lora.target_modules
