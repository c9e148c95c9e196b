"""Log-probs of a reference: a model and preference pairs in; the log-probs of both completions of each pair out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from rlhf_core.supervised.encoding import one_example, read_examples, row_images
from rlhf_core.supervised.examples import Example, Packer
from rlhf_core.supervised.logprobs import LogprobsWorker
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.stored_logprobs import read_logprobs, with_logprobs, write_logprobs
from rlhf_core.training.group import WorkerGroup

_EXAMPLES = 512  # sent to the ranks at a time


def run(config: LogprobsConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Read every pair once; so a killed job restarts from the beginning."""
    model = inputs["model"]
    processor = open_processor(model.folder)
    images = row_images(processor, inputs["dataset"].folder)
    encode = partial(one_example, partial(pair_example, images=images), load_tokenizer(model.folder))
    fitted = read_examples(inputs["dataset"], encode, config, model.folder, context, images=True)
    examples = fitted.rows
    if config.reference is not None:
        examples = with_logprobs(examples, read_logprobs([inputs["reference"].folder]), "reference")
    logprobs_by_pair = torch.zeros(len(examples), 2)
    context.progress(0, len(examples), "start workers")
    with cluster.workers(
        config.placement, config.engine, LogprobsWorker, config, context, model.manifest.ref
    ) as workers:
        pack = partial(pack_pairs, processor=processor)
        for indices, logprobs in read_by(workers, LogprobsWorker.logprobs, examples, pack, config, context):
            logprobs_by_pair[torch.tensor(indices)] = logprobs.view(-1, 2)
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


def read_by(
    workers: WorkerGroup[Any],
    method: Callable[..., Any],
    examples: Sequence[Example],
    pack: Packer,
    config: ReadingConfig,
    context: StageContext,
) -> Iterator[tuple[list[int], Any]]:
    """Yield the result of the ranks' `method` for each micro-batch, with the indices of its examples."""
    for start in range(0, len(examples), _EXAMPLES):
        batch = pack(examples[start : start + _EXAMPLES])
        tokens = config.engine.micro_batch_tokens(config.placement)
        division = Division.of(batch, replicas=workers.replicas, tokens_per_micro_batch=tokens)
        for plan, results in zip(division.plan, workers.scatter(method, division.split()), strict=True):
            for indices, result in zip(plan, results, strict=True):
                if indices:  # not a filler
                    yield [start + index for index in indices], result
        context.progress(min(start + _EXAMPLES, len(examples)), len(examples), "read")
