"""The contract of a training engine: one rank's part of a model that is trained or read on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from rlhf_core.mesh import Mesh
from rlhf_core.metrics import LossAndMetrics, Metric
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.state import Stateful
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)
R = TypeVar("R")
LossFunction = Callable[[nn.Module, B], LossAndMetrics]


@dataclass(frozen=True)
class StepCounters:
    """What the next step depends on besides weights and optimizer state."""

    steps: int = 0  # taken or skipped: the place in the schedule
    skipped_updates: int = 0
    skipped_in_a_row: int = 0

    def after(self, *, applied: bool) -> StepCounters:
        """The counters after one more step."""
        if applied:
            return StepCounters(self.steps + 1, self.skipped_updates, 0)
        return StepCounters(self.steps + 1, self.skipped_updates + 1, self.skipped_in_a_row + 1)


class TrainingEngine(Stateful, Protocol):
    """A wrapped model (PolicyModel, ScalarModel, ...) and its optimizer.

    Every rank of the mesh calls every method, with the same number of micro-batches; ranks of a replica with the same
    ones. `state` is what the next step depends on: trained weights, buffers, optimizer state and counters.
    testing.training_engine.TrainingEngineContract has its tests.
    """

    module: nn.Module  # whose attribute `model` is the transformers or peft model
    mesh: Mesh
    counters: StepCounters

    @property
    def is_trained(self) -> bool:
        """Whether it has an optimizer."""

    @property
    def shares_prompts(self) -> bool:
        """Whether its model computes what several sequences of a micro-batch begin with once."""

    def step(self, micro_batches: Sequence[B], loss: LossFunction[B]) -> StepMetrics:
        """One optimizer step. `loss(model, micro_batch)` returns this micro-batch's part of the step's loss, a sum
        over its tokens divided by a count over the whole step, and its part of the metrics.

        Gradients are summed over micro-batches and replicas, so how the sequences are split does not change the
        update. If the gradient is not finite, the update is skipped: on all ranks, weights and optimizer state stay as
        they were, and the learning rate follows its schedule. Raises StageError if that makes `max_skipped_updates` in
        a row, or if the ranks have different numbers of micro-batches.
        """

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        """`function(model, micro_batch)` of each micro-batch in eval mode, without gradients; nothing is reduced."""

    def measure(
        self, micro_batches: Sequence[B], metrics: Callable[[nn.Module, B], Mapping[str, Metric]]
    ) -> dict[str, float]:
        """The metrics of all micro-batches of all replicas, in eval mode and without gradients; on every rank."""

    def total(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], Tensor]) -> Tensor:
        """The sum of what `forward` returns, over micro-batches and replicas; on every rank."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the model's folder, whole, on every rank; of a PeftModel those of the adapter's folder.

        Tied weights appear once. Every rank must take all; a tensor may change once the next is taken.
        """

    def weight_layout(self) -> dict[str, Tensor]:
        """Name, shape and dtype of what `weights` yields, as tensors without memory; asks no other rank."""

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained weight, whole, in float32, under its name in the wrapped HF model. Every rank must take all."""

    def replaced(self, weights: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Inside, forwards and `weights` use `weights` (rank 0's, others pass None), which have the names of
        `master_weights`; nothing may be trained."""

    def offload(self) -> None:
        """Move everything that this engine keeps on the device to host memory. It cannot compute until `reload`."""

    def reload(self) -> None:
        """Undo `offload`."""
