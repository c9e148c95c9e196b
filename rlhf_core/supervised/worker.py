"""One rank of SFT, pre-training and reward models: trains the steps that it receives, and validates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.metrics import LossAndMetrics, Metric, Sum, merged
from rlhf_core.supervised.examples import Shard, divide
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.build import build_engine
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_everything, seed_rank
from rlhf_core.training.routing import step_routing
from rlhf_core.training.saving import write_model
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import Stateful
from rlhf_core.types import PackedBatch

C = TypeVar("C", bound=SupervisedConfig)


def exact_share(share: float, count: int) -> float:
    """Remove the rounding from a share of `count` that was summed in parts: equal counts must tie."""
    return round(share * count) / count


class SupervisedWorker(SnapshotWorker, Generic[C]):
    """One rank, independent of Ray, and of the data beyond its share of a step."""

    def __init__(self, config: C, context: StageContext, model: ArtifactRef, total_steps: int) -> None:
        super().__init__(context)
        seed_everything(context.seed)
        self.config = config
        self.seed = context.seed
        self.folder = context.fetch(model).folder
        self.engine = build_engine(
            self.build_model(), engine=config.engine, optimizer=config.optimizer, total_steps=total_steps,
            dropout=config.dropout,
        )  # fmt: skip
        self._kept = KeptWeights(self.engine.weight_layout()) if config.keeps_best else None
        seed_rank(context.seed)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the module to train from `self.folder`; its attribute `model` is the transformers or peft model."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        """Return the micro-batch's part of the step's loss and metrics: sums, divided by the totals of `shard`.

        step_routing: of the experts over the whole step; with it, the micro-batch's load is balanced too.
        """

    def balanced(
        self, loss: Tensor, metrics: Mapping[str, Metric], routing: Tensor | None, step_routing: Tensor | None
    ) -> LossAndMetrics:
        """Add the load balancing loss of a mixture of experts, if `step_routing`, that of the whole step, is given."""
        metrics = merged(metrics, {"loss": Sum(loss.detach())})
        if step_routing is None:
            return loss, metrics
        assert routing is not None
        balance = load_balancing_loss(routing, step_routing)
        metrics = merged(metrics, {"load_balancing_loss": Sum(balance.detach())})
        return loss + self.config.moe_coefficient * balance, metrics

    def parts(self) -> Mapping[str, Stateful]:
        trained: dict[str, Stateful] = {"model": self.engine}
        return trained if self._kept is None else trained | {"kept": self._kept}

    def shares_prompts(self) -> bool:
        """True if the model computes a common prefix of a micro-batch's sequences once."""
        return self.engine.shares_prompts

    def train(self, steps: Sequence[Shard]) -> list[StepMetrics]:
        """Take one optimizer step for each shard."""
        return [self._step(shard) for shard in steps]

    def steps_taken(self) -> int:
        """Return the number of optimizer steps so far, with those before the checkpoint that it resumed from."""
        return self.engine.counters.steps

    def prepared(self, shard: Shard) -> Shard:
        """Add the inputs of the loss that are computed before the differentiated forward."""
        return shard

    def _step(self, shard: Shard) -> StepMetrics:
        """Take one optimizer step; for a mixture of experts after a forward that counts the routing of tokens."""
        config: SupervisedConfig = self.config
        shard = self.prepared(shard)
        routing = step_routing(self.engine, shard.micro_batches) if config.moe_coefficient > 0 else None
        return self.engine.step(shard.micro_batches, partial(self.loss, shard=shard, step_routing=routing))

    def validate(self, shard: Shard) -> dict[str, float]:
        """Return the metrics of a whole set of examples, of which `shard` is this rank's part; equal on all ranks.

        Runs in eval mode and without gradients: neither training nor its random generators change.
        """
        shard = self.prepared(shard)
        return self.engine.measure(shard.micro_batches, partial(self.measured, shard=shard))

    def measured(self, model: nn.Module, batch: Any, shard: Shard) -> Mapping[str, Metric]:
        """Return a micro-batch's part of the metrics of `validate`: those of its loss, unless a subclass adds some."""
        return self.loss(model, batch, shard)[1]

    def keep_weights(self) -> None:
        """Copy the current weights, since the best ones are to be kept: `save` writes the last copy.

        A collective call: every rank must make it.
        """
        assert self._kept is not None
        self._kept.keep(self.engine.weights())

    def save(self, folder: Path) -> None:
        """Write the model's folder (with LoRA: the adapter's), on rank 0's node: of the kept weights, or else the
        current ones.

        A collective call: every rank must make it.
        """
        write_model(self.engine, folder, self.folder, self._kept)


def divider(
    config: SupervisedConfig, workers: WorkerGroup[SupervisedWorker[Any]]
) -> Callable[[PackedBatch], list[Shard]]:
    """Return the function that divides the batch of a step or a validation over `workers`."""
    return partial(
        divide, replicas=workers.replicas, tokens_per_micro_batch=config.engine.micro_batch_tokens(config.placement),
        shares_prompts=workers.call(SupervisedWorker.shares_prompts)[0],
    )  # fmt: skip
