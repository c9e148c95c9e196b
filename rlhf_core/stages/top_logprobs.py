"""Top log-probs of a teacher: a model and conversations in; the most probable tokens at each position out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial

import torch
from safetensors.torch import load, save
from transformers import AutoConfig

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.logprobs import TopLogprobsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.logprobs import blocks, read_by
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.supervised.encoding import read_examples
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.logprobs import TopLogprobsWorker
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.supervised.stored_top_logprobs import TeacherSettings, TopWriter
from rlhf_core.training.counts import require_counts
from rlhf_core.training.group import WorkerGroup


def run(config: TopLogprobsConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Read every conversation once."""
    model = inputs["model"]
    encode = partial(conversation_examples, load_tokenizer(model.folder))
    fitted = read_examples(inputs["dataset"], encode, config, model.folder, context)
    examples = fitted.rows
    vocabulary = AutoConfig.from_pretrained(model.folder).get_text_config().vocab_size
    folder = context.workdir / "top_logprobs"
    folder.mkdir()
    writer = TopWriter(folder, TeacherSettings(min(config.k, vocabulary), config.temperature, vocabulary))
    with ExitStack() as stack, PartialRows(config.checkpoint, context) as kept:

        @cache
        def workers() -> WorkerGroup[TopLogprobsWorker]:
            context.progress(0, len(examples), "start workers")
            ref = model.manifest.ref
            return stack.enter_context(
                cluster.workers(config.placement, config.engine, TopLogprobsWorker, config, context, ref)
            )

        def top_of(block: Sequence[Example]) -> tuple[bytes, int]:
            read = list(read_by(workers(), TopLogprobsWorker.top, pack_sequences(block), config))
            order = torch.tensor([index for indices, _ in read for index in indices])
            tokens, logprobs = (torch.cat([top[column] for _, top in read]) for column in (0, 1))
            return save({"order": order, "tokens": tokens, "logprobs": logprobs}), len(block)

        times_read = torch.zeros(len(examples), dtype=torch.int64)
        for start, block in blocks(examples):
            part = load(kept.content(f"read-{start}-{len(block)}", partial(top_of, block)))
            times_read[start + part["order"]] += 1
            in_order = [block[index] for index in part["order"].tolist()]
            counts = [example.num_trained_tokens for example in in_order]
            for example, *top in zip(
                in_order, *(part[name].split(counts) for name in ("tokens", "logprobs")), strict=True
            ):
                writer.add(example, (top[0], top[1]))
            context.progress(start + len(block), len(examples), "read")
    require_counts({"rows that were read once": (len(examples), int((times_read == 1).sum()))})
    writer.flush()
    tokens = sum(example.num_trained_tokens for example in examples)
    return Output(Kind.TOP_LOGPROBS, folder, {"rows": len(examples), "trained_tokens": tokens, **fitted.metrics()})
