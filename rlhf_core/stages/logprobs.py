"""Log-probs of a reference: a model and preference pairs in; what it gives to both completions of each pair out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.preference import LogprobsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.reading import iterate_rows, row_policy
from rlhf_core.division import Division
from rlhf_core.stages.cluster import Cluster
from rlhf_core.supervised.examples import fit_examples
from rlhf_core.supervised.logprobs import LogprobsWorker
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.stored_logprobs import write_logprobs

_PAIRS = 512  # sent to the ranks at a time


def run(config: LogprobsConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """A killed job begins again: it only reads every pair once."""
    model, dataset = inputs["model"], inputs["dataset"].folder
    tokenizer = load_tokenizer(model.folder)
    rows, policy = iterate_rows(dataset), row_policy(dataset)
    fitted = fit_examples(rows, lambda row: [pair_example(tokenizer, row)], policy, model.folder, config.max_length)
    examples = fitted.rows
    found = torch.zeros(len(examples), 2)
    context.progress(0, len(examples), "start workers")
    with cluster.workers(config.placement, LogprobsWorker, config, context, model.manifest.ref) as workers:
        for start in range(0, len(examples), _PAIRS):
            batch = pack_pairs(examples[start : start + _PAIRS])
            division = Division.of(
                batch, replicas=workers.size, tokens_per_micro_batch=config.engine.tokens_per_micro_batch
            )
            parts = workers.scatter(LogprobsWorker.logprobs, division.split())
            for plan, values in zip(division.plan, parts, strict=True):
                for indices, logprobs in zip(plan, values, strict=True):
                    if indices:  # not a filler
                        found[torch.tensor(indices) + start] = logprobs.view(-1, 2)
            context.progress(min(start + _PAIRS, len(examples)), len(examples), "read")
    folder = context.workdir / "logprobs"
    folder.mkdir()
    write_logprobs(folder, examples, found)
    return Output(Kind.LOGPROBS, folder, {"pairs": len(examples), **fitted.metrics()})
