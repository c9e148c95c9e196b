"""Continued pre-training: a model and documents in, the same model (full weights, or an adapter) out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.language_models import PretrainConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.data.reading import row_policy
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.supervised.encoding import read_examples
from rlhf_core.supervised.sft import document_examples
from rlhf_core.supervised.stored_examples import StoredExamples


def run(config: PretrainConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder = inputs["model"].folder
    tokenizer = load_tokenizer(folder)

    def read(dataset: Input) -> Fitted[StoredExamples]:
        # By default a document is split; a policy of drop or truncate splits none.
        piece_length = config.max_length if row_policy(dataset.folder).long == "error" else sys.maxsize
        encode = partial(document_examples, tokenizer, max_length=piece_length)
        return read_examples(dataset, encode, config, folder, context)

    kind = Kind.BASE_MODEL if config.lora is None else Kind.ADAPTER
    return train_language_model(config, inputs, read, context, cluster, kind)
