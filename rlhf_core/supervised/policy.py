"""One rank that trains a causal language model, with any loss."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.routing import experts_per_token
from rlhf_core.supervised.worker import C, SupervisedWorker
from rlhf_core.training.build import sharding


class PolicyWorker(SupervisedWorker[C]):
    wrapper: ClassVar[type[PolicyModel]] = PolicyModel

    def build_model(self) -> nn.Module:
        engine = self.config.engine
        model = load_causal_model(
            self.folder,
            dtype=torch_dtype(engine.dtype),
            attention=engine.attention,
            lora=self.config.adapter,
            gradient_checkpointing=engine.gradient_checkpointing,
            freeze_vision=engine.freeze_vision,
            sharding=sharding(engine),
        )
        if self.config.moe_coefficient > 0:
            experts_per_token(model)
        return self.wrapper(model)
