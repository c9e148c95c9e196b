"""Log-probs of a reference: a model and preference pairs in; the log-probs of both completions of each pair out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.logprobs import LogprobsConfig, ReadingConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.division import Division
from rlhf_core.evaluation.intervals import bootstrap, wilson
from rlhf_core.models.vision import open_processor
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.supervised.encoding import one_example, read_examples, row_images
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.logprobs import LogprobsWorker
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.stored_logprobs import read_logprobs, with_logprobs, write_logprobs
from rlhf_core.training.counts import require_counts
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import PackedBatch

_EXAMPLES = 512  # sent to the ranks at a time


def run(config: LogprobsConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Read every pair once."""
    model = inputs["model"]
    processor = open_processor(model.folder)
    images = row_images(processor, inputs["dataset"].folder)
    encode = partial(one_example, partial(pair_example, images=images), load_tokenizer(model.folder))
    fitted = read_examples(inputs["dataset"], encode, config, model.folder, context)
    examples = fitted.rows
    if config.reference is not None:
        examples = with_logprobs(examples, read_logprobs([inputs["reference"].folder]), "reference")
    logprobs_by_pair, times_read = torch.zeros(len(examples), 2), torch.zeros(len(examples), dtype=torch.int64)
    with ExitStack() as stack, PartialRows(config.checkpoint, context) as kept:

        @cache
        def workers() -> WorkerGroup[LogprobsWorker]:
            context.progress(0, len(examples), "start workers")
            ref = model.manifest.ref
            return stack.enter_context(
                cluster.workers(config.placement, config.engine, LogprobsWorker, config, context, ref)
            )

        def logprobs_of(start: int, block: Sequence[Example]) -> list[Any]:
            batch = pack_pairs(block, processor=processor)
            read = read_by(workers(), LogprobsWorker.logprobs, batch, config)
            return [
                [start + index, of_pair]
                for indices, logprobs in read
                for index, of_pair in zip(indices, logprobs.view(-1, 2).tolist(), strict=True)
            ]

        for start, block in blocks(examples):
            for index, of_pair in kept.rows(f"read-{start}-{len(block)}", partial(logprobs_of, start, block)):
                logprobs_by_pair[index] = torch.tensor(of_pair)
                times_read[index] += 1
            context.progress(start + len(block), len(examples), "read")
    require_counts({"pairs that were read once": (len(examples), int((times_read == 1).sum()))})
    folder = context.workdir / "logprobs"
    folder.mkdir()
    write_logprobs(folder, examples, logprobs_by_pair)
    metrics = {**preferred(examples, logprobs_by_pair.double()), "pairs": len(examples), **fitted.metrics()}
    return Output(Kind.LOGPROBS, folder, metrics)


def preferred(examples: Sequence[Example], logprobs: torch.Tensor) -> dict[str, float]:
    """Return how often a model prefers the chosen completion (a tie is wrong), and by how much, with 95 % intervals.

    Intervals are over the pairs: `accuracy` and `gap` by the log-probs of whole completions, in nats; `token_accuracy`
    by their means over tokens; where the examples have a reference's log-probs, `reward_accuracy` and `reward_gap` by
    log p - log p of the reference: DPO's reward with a beta of 1 (eq. 5 of arXiv:2305.18290).

    logprobs: (E, 2) float64, of the chosen and the rejected completion.
    """
    lengths = torch.tensor([[sum(mask) for mask in example.masks] for example in examples])
    compared = {"": logprobs, "token_": logprobs / lengths}
    if examples[0].reference:
        rewards = logprobs - torch.tensor([example.reference for example in examples]).double()
        compared = {"reward_": rewards, **compared}
    metrics: dict[str, float] = {}
    for prefix, values in compared.items():
        gaps = values[:, 0] - values[:, 1]
        estimates = {"accuracy": wilson(int((gaps > 0).sum()), len(examples))}
        if prefix != "token_":
            # One seed for all runs: a stage that trains nothing is not computed again for another one.
            estimates["gap"] = bootstrap(gaps.tolist(), seed=0)
        for name, estimate in estimates.items():
            metrics |= {f"{prefix}{name}{end}": value for end, value in
                        (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high))}  # fmt: skip
    return metrics


def blocks(examples: Sequence[Example]) -> Iterator[tuple[int, Sequence[Example]]]:
    """Yield the examples that the ranks read together, with the index of the first."""
    for start in range(0, len(examples), _EXAMPLES):
        yield start, examples[start : start + _EXAMPLES]


def read_by(
    workers: WorkerGroup[Any], method: Callable[..., Any], batch: PackedBatch, config: ReadingConfig
) -> Iterator[tuple[list[int], Any]]:
    """Yield the result of the ranks' `method` for each micro-batch, with the indices of its examples in the batch."""
    tokens = config.engine.micro_batch_tokens(config.placement)
    division = Division.of(batch, replicas=workers.replicas, tokens_per_micro_batch=tokens)
    for plan, results in zip(division.plan, workers.scatter(method, division.split()), strict=True):
        for indices, result in zip(plan, results, strict=True):
            if indices:  # not a filler
                yield list(indices), result
