"""Top log-probs of a teacher: a model and conversations in; the most probable tokens at each position out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from transformers import AutoConfig

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.logprobs import TopLogprobsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.logprobs import read_by
from rlhf_core.supervised.encoding import read_examples
from rlhf_core.supervised.logprobs import TopLogprobsWorker
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.supervised.stored_top_logprobs import TeacherSettings, TopWriter


def run(config: TopLogprobsConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Read every conversation once; so a killed job restarts from the beginning."""
    model = inputs["model"]
    encode = partial(conversation_examples, load_tokenizer(model.folder))
    fitted = read_examples(inputs["dataset"], encode, config, model.folder, context)
    examples = fitted.rows
    vocabulary = AutoConfig.from_pretrained(model.folder).get_text_config().vocab_size
    folder = context.workdir / "top_logprobs"
    folder.mkdir()
    writer = TopWriter(folder, TeacherSettings(min(config.k, vocabulary), config.temperature, vocabulary))
    context.progress(0, len(examples), "start workers")
    with cluster.workers(
        config.placement, config.engine, TopLogprobsWorker, config, context, model.manifest.ref
    ) as workers:
        for indices, top in read_by(workers, TopLogprobsWorker.top, examples, pack_sequences, config, context):
            counts = [examples[index].num_trained_tokens for index in indices]
            for index, *part in zip(indices, *(values.split(counts) for values in top), strict=True):
                writer.add(examples[index], (part[0], part[1]))
    writer.flush()
    tokens = sum(example.num_trained_tokens for example in examples)
    return Output(Kind.TOP_LOGPROBS, folder, {"rows": len(examples), "trained_tokens": tokens, **fitted.metrics()})
