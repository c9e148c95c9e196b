"""The interface of a training engine: one rank's part of a model on a mesh, trained or frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Counters that the next step depends on, besides weights and optimizer state."""

    steps: int = 0  # applied or skipped: the position in the schedule
    skipped_updates: int = 0
    skipped_in_a_row: int = 0

    def after(self, *, applied: bool) -> StepCounters:
        """Return the counters after one more step."""
        if applied:
            return StepCounters(self.steps + 1, self.skipped_updates, 0)
        return StepCounters(self.steps + 1, self.skipped_updates + 1, self.skipped_in_a_row + 1)


class TrainingEngine(Stateful, Protocol):
    """A wrapped model (PolicyModel, ScalarModel, ...) and its optimizer.

    Every rank of the mesh calls every method, with the same number of micro-batches; ranks of one replica pass the
    same ones. `state` has trained weights, buffers, optimizer state and counters.
    testing.training_engine.TrainingEngineContract has the tests of an implementation.
    """

    module: nn.Module  # whose attribute `model` is the transformers or peft model
    mesh: Mesh
    counters: StepCounters

    @property
    def is_trained(self) -> bool:
        """True if it has an optimizer."""

    @property
    def shares_prompts(self) -> bool:
        """True if the model computes a common prefix of several sequences of a micro-batch once."""

    def step(self, micro_batches: Sequence[B], loss: LossFunction[B]) -> StepMetrics:
        """Run one optimizer step.

        `loss(model, micro_batch)` returns the micro-batch's part of the step's loss (a sum over its tokens divided by
        a count over the whole step) and of the metrics. Gradients are summed over micro-batches and replicas, so the
        update does not depend on the split of the sequences. If the gradient is not finite, the update is skipped on
        all ranks: weights and optimizer state are unchanged, and the learning-rate schedule advances. Raises
        StageError after `max_skipped_updates` skipped updates in a row, or if the ranks have different numbers of
        micro-batches.
        """

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        """Return `function(model, micro_batch)` of each micro-batch, unreduced, in eval mode without gradients."""

    def measure(
        self, micro_batches: Sequence[B], metrics: Callable[[nn.Module, B], Mapping[str, Metric]]
    ) -> dict[str, float]:
        """Return the metrics over all micro-batches and replicas, on every rank, in eval mode without gradients."""

    def total(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], Tensor]) -> Tensor:
        """Return the results of `forward` summed over micro-batches and replicas, on every rank."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full tensor of the model's folder (of a PeftModel, the adapter's folder) on every rank.

        Tied weights appear once. Every rank must consume all tensors; each is valid until the next one.
        """

    def weight_layout(self) -> dict[str, Tensor]:
        """Return the tensors of `weights` on the meta device, without communication."""

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full trained weight in float32, by its name in the HF model. Every rank must consume all."""

    def replaced(self, weights: Iterable[tuple[str, Tensor]]) -> AbstractContextManager[None]:
        """Use `weights` instead of the trained weights within the context, in which nothing may be trained.

        weights: with the names and in the order of `master_weights`, whole and equal on every rank.
        """

    def offload(self) -> None:
        """Move the engine's tensors from the device to host memory. It cannot compute until `reload`."""

    def reload(self) -> None:
        """Undo `offload`."""
