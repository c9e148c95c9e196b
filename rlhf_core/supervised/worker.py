"""One rank of SFT, pre-training and reward models: trains the steps that it is sent, and validates."""

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
from rlhf_core.models.loading import save_model
from rlhf_core.supervised.examples import Shard, divide
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_everything, seed_rank
from rlhf_core.training.routing import step_routing
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import EngineState, Stateful
from rlhf_core.types import PackedBatch

C = TypeVar("C", bound=SupervisedConfig)


def exact_share(share: float, count: int) -> float:
    """A share of `count` that was added up of rounded parts: equal counts must tie."""
    return round(share * count) / count


class SupervisedWorker(SnapshotWorker, Generic[C]):
    """One rank. Knows nothing of Ray, nor of the data beyond its share of a step."""

    def __init__(self, config: C, context: StageContext, model: ArtifactRef, total_steps: int) -> None:
        super().__init__(context)
        seed_everything(context.seed)
        self.config = config
        self.seed = context.seed
        self.folder = context.fetch(model).folder
        self.engine = DeepSpeedEngine(
            self.build_model(), engine=config.engine, optimizer=config.optimizer, total_steps=total_steps,
            dropout=config.dropout,
        )  # fmt: skip
        self._kept = KeptWeights()
        seed_rank(context.seed)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The module to train, from `self.folder`; its attribute `model` is the transformers or peft model in it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        """The micro-batch's part of the step's loss and metrics: sums, divided by the totals of `shard`.

        step_routing: how the experts are chosen over the whole step; with it, the micro-batch's load is balanced too.
        """

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

    def parts(self) -> Mapping[str, Stateful]:
        trained: dict[str, Stateful] = {"model": EngineState(self.engine)}
        return trained | {"kept": self._kept} if self.config.keeps_best else trained

    def shares_prompts(self) -> bool:
        """Whether the model computes what several sequences of a micro-batch begin with once."""
        return self.engine.shares_prompts

    def train(self, steps: Sequence[Shard]) -> list[StepMetrics]:
        """One optimizer step for each shard."""
        return [self._step(shard) for shard in steps]

    def prepared(self, shard: Shard) -> Shard:
        """With what the loss needs to know before the forward that is differentiated."""
        return shard

    def _step(self, shard: Shard) -> StepMetrics:
        """One optimizer step; of a mixture of experts after a forward that counts how tokens are routed."""
        config: SupervisedConfig = self.config
        shard = self.prepared(shard)
        routing = step_routing(self.engine, shard.micro_batches) if config.moe_coefficient > 0 else None
        return self.engine.step(shard.micro_batches, partial(self.loss, shard=shard, step_routing=routing))

    def validate(self, shard: Shard) -> dict[str, float]:
        """What is measured of a whole set of examples, of which `shard` is this rank's part; equal on all ranks.

        In eval mode and without gradients: what is trained, and its random numbers, do not change.
        """
        shard = self.prepared(shard)
        return self.engine.measure(shard.micro_batches, partial(self.measured, shard=shard))

    def measured(self, model: nn.Module, batch: Any, shard: Shard) -> Mapping[str, Metric]:
        """A micro-batch's part of what `validate` measures: the metrics of its loss, unless a subclass says more."""
        return self.loss(model, batch, shard)[1]

    def keep_weights(self) -> None:
        """Copy the weights as they are: unless others are kept later, they are what `save` writes if the best are to
        be kept. Every rank must call it."""
        self._kept.keep(self.engine.full_state_dict())

    def save(self, folder: Path) -> None:
        """Write the model's folder (with LoRA: the adapter's), on rank 0's node: of the weights that were kept, or else
        as they are. Every rank must call it."""
        state = self._kept.state_dict if self.config.keeps_best else self.engine.full_state_dict()
        if state is not None:
            model = self.engine.module.model
            assert isinstance(model, nn.Module)
            save_model(model, state, folder, self.folder)


def divider(
    config: SupervisedConfig, workers: WorkerGroup[SupervisedWorker[Any]]
) -> Callable[[PackedBatch], list[Shard]]:
    """What divides the batch of a step, or of a validation, over `workers` as their model computes it."""
    return partial(
        divide, ranks=workers.size, tokens_per_micro_batch=config.engine.micro_batch_tokens(config.placement),
        shares_prompts=workers.call(SupervisedWorker.shares_prompts)[0],
    )  # fmt: skip
