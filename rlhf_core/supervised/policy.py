"""One rank that trains a causal language model, whatever the loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.metrics import LossAndMetrics, Metric, Sum, merged
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.routing import experts_per_token
from rlhf_core.supervised.worker import C, SupervisedWorker


class PolicyWorker(SupervisedWorker[C]):
    def build_model(self) -> nn.Module:
        engine = self.config.engine
        model = load_causal_model(
            self.folder,
            dtype=torch_dtype(engine.dtype),
            attention=engine.attention,
            lora=self.config.adapter,
            gradient_checkpointing=engine.gradient_checkpointing,
        )
        if self.config.moe_coefficient > 0:
            experts_per_token(model)
        return PolicyModel(model)

    def balanced(
        self, loss: Tensor, metrics: Mapping[str, Metric], routing: Tensor | None, step_routing: Tensor | None
    ) -> LossAndMetrics:
        """With the load of a mixture of experts balanced, if `step_routing` says how the whole step chooses them."""
        metrics = merged(metrics, {"loss": Sum(loss.detach())})
        if step_routing is None:
            return loss, metrics
        assert routing is not None
        balance = load_balancing_loss(routing, step_routing)
        metrics = merged(metrics, {"load_balancing_loss": Sum(balance.detach())})
        return loss + self.config.moe_coefficient * balance, metrics
