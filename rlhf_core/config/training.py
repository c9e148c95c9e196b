"""Settings shared by every stage that trains: optimizer, precision, sharding, adapters, placement."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.base import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    operational,
)


class OptimizerConfig(Config):
    name: Literal["adamw"] = Field(default="adamw", description="the optimizer")
    learning_rate: PositiveFloat = Field(description="the highest, after the warm-up")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="decay of the mean and of the square of the gradient"
    )
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="of the learning rate after the warm-up"
    )
    warmup_share: Share = Field(default=0.05, description="share of the steps in which the rate rises from zero")
    final_learning_rate_share: Share = Field(default=0.1, description="of the highest rate, at the end")
    max_gradient_norm: PositiveFloat = Field(default=1.0, description="a longer gradient is scaled down to this")


class LoraConfig(Config):
    rank: PositiveInt = Field(description="of the adapter's matrices")
    alpha: PositiveFloat = Field(default=32.0, description="the adapter's output is scaled by alpha / rank")
    dropout: Share = Field(default=0.0, description="before the adapter")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear", description="names of the layers that get an adapter"
    )


class EngineConfig(Config):
    """How DeepSpeed and transformers run a model. Precision and attention change results; sharding only rounding."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="of weights and activations; master weights are float32"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="implementation; the last one needs a GPU"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=2, description="what DeepSpeed shards over the workers: 1 optimizer, 2 gradients too, 3 weights too"
    )
    offload_optimizer: bool = operational(False, description="keep the optimizer's state in main memory")
    gradient_checkpointing: bool = operational(False, description="compute activations twice instead of keeping them")
    tokens_per_micro_batch: PositiveInt = operational(16384, description="packed tokens of one forward")


class Placement(Config):
    """What Ray reserves for one group of workers. `threads` 0 means: as many as the reserved CPUs."""

    workers: PositiveInt = Field(default=1, description="training processes")
    cpus_per_worker: PositiveFloat = Field(default=1.0, description="CPUs that Ray reserves")
    gpus_per_worker: NonNegativeFloat = Field(default=0.0, description="GPUs that Ray reserves")
    threads: NonNegativeInt = Field(default=0, description="of torch in each worker; 0: as many as the reserved CPUs")


class SupervisedConfig(Config):
    """An epoch-wise run over one dataset."""

    dataset: str = Field(description="name of an entry of the recipe's `data`")
    epochs: PositiveInt = Field(default=1, description="passes over the dataset")
    max_steps: PositiveInt | None = Field(default=None, description="optimizer steps at most; none: all epochs")
    batch_size: PositiveInt = Field(description="sequences of one optimizer step, over all workers")
    max_length: PositiveInt = Field(description="longest sequence in tokens; a longer one is an error")
    optimizer: OptimizerConfig = Field(description="of the weights")
    engine: EngineConfig = Field(default=EngineConfig(), description="how the model is trained")
    placement: Placement = operational(Placement, description="what its workers reserve")
    log_every: PositiveInt = operational(10, description="steps between two lines of metrics")
