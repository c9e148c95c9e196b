"""Training engines keep one contract: DeepSpeed's, without ZeRO and with its stages."""

from __future__ import annotations

from typing import Literal

import pytest
from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.testing.training_engine import TrainingEngineContract
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine

pytestmark = pytest.mark.parts


class TestWithoutZero(TrainingEngineContract):
    zero_stage: Literal[0, 1, 2, 3] = 0

    def build(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> DeepSpeedEngine:
        config = EngineConfig(dtype="float32", zero_stage=self.zero_stage)
        return DeepSpeedEngine(model, engine=config, optimizer=optimizer, total_steps=total_steps)


class TestZero2(TestWithoutZero):
    zero_stage = 2


@pytest.mark.endurance("architectures")
class TestZero3(TestWithoutZero):
    zero_stage = 3
