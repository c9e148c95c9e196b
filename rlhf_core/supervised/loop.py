"""Epochs over a dataset, on any number of ranks: the loop of SFT, pre-training and reward models.

The driver owns the data. It selects the examples of a step as a pure function of (seed, epoch); divides them over the
ranks; and sends the ranks `log_every` steps at a time. The workers own the model and have no access to the data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.contract import StageContext
from rlhf_core.supervised.counts import TrainedCounts
from rlhf_core.supervised.examples import Example, Packer
from rlhf_core.supervised.schedule import step_indices
from rlhf_core.supervised.validation import Validation
from rlhf_core.supervised.worker import SupervisedWorker, divider
from rlhf_core.system.watchdog import WATCHDOG
from rlhf_core.training.checkpointing import Checkpointing, DriverState
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import StepMetrics, over_steps


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
        """Return metrics over the steps (`over_steps`), but the last learning rate, and start the next line."""
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
    workers: WorkerGroup[SupervisedWorker[Any]],
    context: StageContext,
    validation: Validation | None = None,
) -> dict[str, float]:
    """Train from the newest checkpoint, or the beginning, to the end. Logs and reports progress every `log_every`
    steps.

    Returns the last metrics logged, whose `tokens` counts all tokens so far, trained or not, what was trained in all,
    and the best validation. Raises StageError if that is not what settings and data say.
    """
    total = config.count_steps(len(examples))
    divide = divider(config, workers)
    trained = SinceLastLine()
    counts = TrainedCounts()
    driver: dict[str, DriverState] = {"trained": trained, "counts": counts}
    if validation is not None:
        driver["validation"] = validation.best
    checkpoints = Checkpointing(config.checkpoint, context, workers, driver)
    done = checkpoints.resume(total)
    counts.begin_at(config, len(examples), context.seed, done)
    context.progress(done, total, "train")
    schedule = islice(step_indices(len(examples), config, context.seed), done, total)
    metrics: dict[str, float] = {}

    def chunk_length() -> int:
        """Return the number of steps until the next action between two of them."""
        until = [config.log_every - done % config.log_every, checkpoints.steps_left(done)]
        return min(until if validation is None else [*until, validation.steps_left(done)])

    while chunk := list(islice(schedule, chunk_length())):
        started = time.monotonic()
        steps, tokens = [], 0
        for indices in chunk:
            batch = [examples[i] for i in indices]
            tokens += sum(example.num_tokens for example in batch)
            counts.add(indices, sum(example.num_trained_tokens for example in batch))
            steps.append(divide(pack(batch)))
        with WATCHDOG.phase("train", units=len(chunk)):
            by_step = workers.scatter(SupervisedWorker.train, [list(each) for each in zip(*steps, strict=True)])[0]
        done += len(chunk)
        counts.add_steps(by_step)
        trained.add(by_step, tokens, time.monotonic() - started)
        if done % config.log_every == 0 or done == total:
            metrics = trained.line()
            context.log(done, metrics)
            context.progress(done, total, "train", loss=metrics["loss"])
        if validation is not None:
            validation.after(done, total)
        if done < total:
            checkpoints.after(done)
    checkpoints.finish()
    taken = workers.call(SupervisedWorker.steps_taken)[0]
    metrics = metrics | counts.proven(config, len(examples), context.seed, taken)
    return metrics if validation is None else metrics | validation.result()
