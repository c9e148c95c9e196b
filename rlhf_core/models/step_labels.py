"""A language model as a process reward model: the log-odds of two labels after a step's tag."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf_core.models.packed import CausalModel, in_trained_example
from rlhf_core.types import PackedBatch


class StepLabels(CausalModel):
    """A causal language model read at the trained tokens of a batch, the last ones of tags."""

    def __init__(self, model: nn.Module, labels: tuple[int, int]) -> None:
        """model: see CausalModel. labels: tokens of a right and of a wrong step."""
        super().__init__(model)
        self._labels = labels

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return log p(right) - log p(wrong) as the next token of each trained one, (N,), and 0 elsewhere."""
        return self.read(batch, with_routing=False)[0]

    def read(self, batch: PackedBatch, *, with_routing: bool) -> tuple[Tensor, Tensor | None]:
        """Return what `forward` does, and `routing_sums` (2, E) of the experts or None."""
        routing = None
        if with_routing:
            hidden, routing = self._routed(batch, in_trained_example(batch))
        else:
            hidden = self._hidden(batch)
        tags = batch.loss_mask.nonzero().squeeze(-1)
        logits = self.head(hidden.dealt(tags))
        right, wrong = (logits[:, label] for label in self._labels)
        odds = (right - wrong).to(torch.promote_types(logits.dtype, torch.float32))
        return self._of_batch(odds, self.own_rows(tags), batch), routing


class TrainedStepLabels(StepLabels):
    """The same in the form of supervised.scalar.RewardModel, whose workers train it."""

    def forward(self, batch: PackedBatch, *, with_routing: bool = False) -> tuple[Tensor, None, Tensor | None]:  # type: ignore[override]
        odds, routing = self.read(batch, with_routing=with_routing)
        return odds, None, routing
