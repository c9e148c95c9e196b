"""Process reward model in token form: a language model trained to give the right label after each step's tag."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.step_tags import label_ids
from rlhf_core.metrics import Metric
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.routing import experts_per_token
from rlhf_core.models.step_labels import TrainedStepLabels
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.targets import ProcessRewardModelWorker
from rlhf_core.training.build import sharding
from rlhf_core.types import TargetBatch


class StepLabelsWorker(ProcessRewardModelWorker):
    def build_model(self) -> nn.Module:
        config = self.config
        model = load_causal_model(
            self.folder,
            dtype=torch_dtype(config.engine.dtype),
            attention=config.engine.attention,
            lora=config.adapter,
            gradient_checkpointing=config.engine.gradient_checkpointing,
            sharding=sharding(config.engine),
        )
        if config.moe_coefficient > 0:
            experts_per_token(model)
        return TrainedStepLabels(model, label_ids(load_tokenizer(self.folder), config.labels))

    def judged(
        self, model: nn.Module, batch: TargetBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Metric], Tensor]:
        loss, metrics, odds = super().judged(model, batch, shard, step_routing)
        return loss, metrics, odds.sigmoid()  # the rewards, whose scale is measured
