"""Continued pre-training: a model and documents in, the same model with full weights out."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import PretrainConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.fitting import Fitted, Row
from rlhf_core.data.reading import iterate_rows, row_policy
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.supervised.examples import Example, fit_examples
from rlhf_core.supervised.sft import document_examples


def run(config: PretrainConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder = inputs["model"].folder
    tokenizer = load_tokenizer(folder)

    def read(dataset: Input) -> Fitted[Example]:
        policy = row_policy(dataset.folder)
        # By default a document is split; a policy of drop or truncate splits none.
        piece_length = config.max_length if policy.long == "error" else sys.maxsize

        def encode(row: Row) -> list[Example]:
            return document_examples(tokenizer, row, piece_length)

        return fit_examples(iterate_rows(dataset.folder), encode, policy, folder, config.max_length)

    return train_language_model(config, inputs, read, context, cluster, Kind.BASE_MODEL)
