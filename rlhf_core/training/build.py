"""Construction of training engines: the only module that names an implementation."""

from __future__ import annotations

from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.models.sharded_loading import Sharding
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.deepspeed_sharding import ZeroSharding
from rlhf_core.training.engine import TrainingEngine


def sharding(engine: EngineConfig) -> Sharding | None:
    """Return the division of weights over the ranks as they are loaded; none: each rank loads the whole model."""
    return ZeroSharding(engine) if engine.zero_stage == 3 else None


def build_engine(
    model: nn.Module,
    *,
    engine: EngineConfig,
    optimizer: OptimizerConfig | None = None,
    total_steps: int = 0,
    dropout: bool = True,
) -> TrainingEngine:
    """Build the engine of `model` on this rank; see DeepSpeedEngine. optimizer None: forwards only."""
    return DeepSpeedEngine(model, engine=engine, optimizer=optimizer, total_steps=total_steps, dropout=dropout)
