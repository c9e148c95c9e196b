"""Epochs over a dataset, on any number of ranks: the loop and the worker of SFT, pre-training and reward models.

The driver owns the data. It decides, as a pure function of (seed, epoch), which examples make a step; divides them
over the ranks; and sends the ranks `log_every` steps at a time. The workers own the model and know nothing of the data.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.data import LongRowPolicy
from rlhf_core.config.training import SupervisedConfig
from rlhf_core.contract import StageContext
from rlhf_core.data.lengths import Fitted, fit
from rlhf_core.division import Division
from rlhf_core.errors import StageError
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.models.loading import save_model
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import StepMetrics, over_steps
from rlhf_core.training.randomness import derived_seed, seed_everything, seed_rank
from rlhf_core.training.routing import step_routing
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import EngineState, Stateful
from rlhf_core.types import PackedBatch


@dataclass(frozen=True, slots=True)
class Example:
    """What a batch size counts: one sequence, or the two sequences of a pair, chosen first."""

    row_id: str
    sequences: tuple[list[int], ...]  # token ids
    masks: tuple[list[bool], ...]  # true where the token is trained; as long as the sequence
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_trained_tokens(self) -> int:
        return sum(map(sum, self.masks))


Packer = Callable[[Sequence[Example]], PackedBatch]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one optimizer step, with the totals over all ranks that its sums are divided by."""

    micro_batches: list[PackedBatch]
    num_tokens: int  # trained tokens
    num_examples: int


def require_fit(
    examples: Sequence[Example], folder: Path, max_length: int, on_long_row: LongRowPolicy = "error"
) -> Fitted[Example]:
    """The examples to train on: those that fit, and with `truncate` the others cut at their end.

    folder: of the model whose context bounds `max_length`.
    Raises StageError if there is nothing to train, if max_length exceeds the context, or, where the policy is `error`,
    if a sequence exceeds max_length.
    """
    context_length = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", None)
    if context_length is not None and max_length > context_length:
        raise StageError(f"max_length is {max_length}, but the model's context is {context_length} tokens")
    if not examples:
        raise StageError("the dataset has no row to train on")
    for example in examples:
        if not example.num_trained_tokens:
            raise StageError(f"row {example.row_id} has no token to train on; drop it from the dataset")

    def problem(example: Example) -> str | None:
        longest = max(map(len, example.sequences))
        if longest <= max_length:
            return None
        return (
            f"row {example.row_id} is {longest} tokens long and max_length is {max_length}: raise max_length, "
            "or drop or truncate such rows (the dataset's on_long_row)"
        )

    fitted = fit(examples, on_long_row, problem=problem, truncate=lambda example: truncated(example, max_length))
    if not fitted.rows:
        raise StageError(f"all {len(examples)} rows of the dataset are longer than max_length={max_length}")
    return fitted


def truncated(example: Example, max_length: int) -> Example | None:
    """The example with its sequences cut at their ends: no token is added, so no EOS is taught at the cut.

    None if no trained token is left, or if the completions of a pair do not differ any more. Those of a pair begin at
    the same token, so that both keep something if the chosen one does.
    """
    sequences = tuple(ids[:max_length] for ids in example.sequences)
    masks = tuple(mask[:max_length] for mask in example.masks)
    if not any(masks[0]) or any(ids == sequences[0] for ids in sequences[1:]):
        return None
    return Example(example.row_id, sequences, masks, example.margin)


def count_steps(num_examples: int, config: SupervisedConfig) -> int:
    """Optimizer steps of the run: those of its epochs, but at most `max_steps`."""
    steps = config.epochs * -(-num_examples // config.batch_size)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def shuffled(count: int, *, seed: int, name: str) -> list[int]:
    """0 .. count - 1 in an order that depends on the arguments alone."""
    generator = torch.Generator().manual_seed(derived_seed(seed, name))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def step_indices(num_examples: int, config: SupervisedConfig, seed: int) -> Iterator[list[int]]:
    """The examples of each optimizer step. An epoch's last step takes the remaining examples."""
    for epoch in range(config.epochs):
        order = shuffled(num_examples, seed=seed, name=f"epoch {epoch}")
        for start in range(0, num_examples, config.batch_size):
            yield order[start : start + config.batch_size]


def divide(batch: PackedBatch, ranks: int, tokens_per_micro_batch: int) -> list[Shard]:
    """The batch of one optimizer step as one shard per rank; every rank runs the same number of forwards."""
    division = Division.of(batch, replicas=ranks, tokens_per_micro_batch=tokens_per_micro_batch)
    return [Shard(part, batch.num_trained_tokens, batch.num_examples) for part in division.split()]


class SupervisedWorker(SnapshotWorker):
    """One rank. Knows nothing of Ray, nor of the data beyond its share of a step."""

    def __init__(self, config: SupervisedConfig, context: StageContext, model: ArtifactRef, total_steps: int) -> None:
        super().__init__(context)
        seed_everything(context.seed)
        self.config: Any = config  # a subclass reads the settings of its own stage too
        self.seed = context.seed
        self.folder = context.fetch(model).folder
        self.engine = DeepSpeedEngine(
            self.build_model(), engine=config.engine, optimizer=config.optimizer, total_steps=total_steps
        )
        seed_rank(context.seed)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The module to train, from `self.folder`; its attribute `model` is the transformers or peft model in it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        """The micro-batch's part of the step's loss and metrics: sums, divided by the totals of `shard`.

        step_routing: how the experts are chosen over the whole step; with it, the micro-batch's load is balanced too.
        """

    def parts(self) -> Mapping[str, Stateful]:
        return {"model": EngineState(self.engine)}

    def train(self, steps: Sequence[Shard]) -> list[StepMetrics]:
        """One optimizer step for each shard."""
        return [self._step(shard) for shard in steps]

    def _step(self, shard: Shard) -> StepMetrics:
        """One optimizer step; of a mixture of experts after a forward that counts how tokens are routed."""
        config: SupervisedConfig = self.config
        routing = step_routing(self.engine, shard.micro_batches) if config.moe_coefficient > 0 else None
        return self.engine.step(shard.micro_batches, partial(self.loss, shard=shard, step_routing=routing))

    def save(self, folder: Path) -> None:
        """Write the model's folder (with LoRA: the adapter's), on rank 0's node. Every rank must call it."""
        state = self.engine.full_state_dict()
        if state is not None:
            model = self.engine.module.model
            assert isinstance(model, nn.Module)
            save_model(model, state, folder, self.folder)


@dataclass
class SinceLastLine:
    """Steps since the last line of metrics, and all tokens seen so far. Implements checkpointing.DriverState."""

    steps: list[StepMetrics] = field(default_factory=list)
    seen: int = 0  # tokens, trained or not
    seconds: float = 0.0
    tokens: int = 0  # of the whole run

    def add(self, steps: Sequence[StepMetrics], tokens: int, seconds: float) -> None:
        self.steps += steps
        self.seen += tokens
        self.seconds += seconds
        self.tokens += tokens

    def line(self) -> dict[str, float]:
        """Metrics over the steps (`over_steps`), but the last learning rate. Starts the next line."""
        metrics = over_steps(self.steps) | {
            "learning_rate": self.steps[-1].learning_rate,
            "tokens": self.tokens,
            "tokens_per_second": self.seen / self.seconds,
        }
        self.steps, self.seen, self.seconds = [], 0, 0.0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [StepMetrics(**step) for step in state["steps"]]
        self.seen, self.seconds, self.tokens = state["seen"], state["seconds"], state["tokens"]


def train(
    config: SupervisedConfig,
    examples: Sequence[Example],
    pack: Packer,
    workers: WorkerGroup[SupervisedWorker],
    context: StageContext,
) -> dict[str, float]:
    """The whole run, or what is left of it after its newest checkpoint. Logs and reports progress every `log_every`
    steps; returns the last metrics logged, of which `tokens` counts those seen so far, trained or not."""
    total = count_steps(len(examples), config)
    trained = SinceLastLine()
    checkpoints = Checkpointing(config.checkpoint, context, workers, {"trained": trained})
    done = checkpoints.resume(total)
    context.progress(done, total, "train")
    schedule = islice(step_indices(len(examples), config, context.seed), done, total)
    metrics: dict[str, float] = {}
    while chunk := list(
        islice(schedule, min(config.log_every - done % config.log_every, checkpoints.steps_left(done)))
    ):
        started = time.monotonic()
        steps = [
            divide(pack([examples[i] for i in indices]), workers.size, config.engine.tokens_per_micro_batch)
            for indices in chunk
        ]
        by_step = workers.scatter(SupervisedWorker.train, [list(rank) for rank in zip(*steps, strict=True)])[0]
        done += len(chunk)
        tokens = sum(examples[i].num_tokens for indices in chunk for i in indices)
        trained.add(by_step, tokens, time.monotonic() - started)
        if done % config.log_every == 0 or done == total:
            metrics = trained.line()
            context.log(done, metrics)
            context.progress(done, total, "train", loss=metrics["loss"])
        if done < total:
            checkpoints.after(done)
    checkpoints.finish()
    return metrics
