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
    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_share: Share = 0.05
    final_learning_rate_share: Share = 0.1
    max_gradient_norm: PositiveFloat = 1.0


class LoraConfig(Config):
    rank: PositiveInt
    alpha: PositiveFloat = 32.0
    dropout: Share = 0.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class EngineConfig(Config):
    """How DeepSpeed and transformers run a model. Precision and attention change results; sharding only rounding."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = operational(False)
    gradient_checkpointing: bool = operational(False)
    tokens_per_micro_batch: PositiveInt = operational(16384, description="packed tokens of one forward")


class Placement(Config):
    """What Ray reserves for one group of workers. `threads` 0 means: as many as the reserved CPUs."""

    workers: PositiveInt = 1
    cpus_per_worker: PositiveFloat = 1.0
    gpus_per_worker: NonNegativeFloat = 0.0
    threads: NonNegativeInt = 0


class SupervisedConfig(Config):
    """An epoch-wise run over one dataset."""

    dataset: str = Field(description="name of an entry of the recipe's `data`")
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = Field(description="sequences of one optimizer step, over all workers")
    max_length: PositiveInt = Field(description="longest sequence in tokens; a longer one is an error")
    optimizer: OptimizerConfig
    engine: EngineConfig = EngineConfig()
    placement: Placement = operational(Placement)
    log_every: PositiveInt = operational(10)
