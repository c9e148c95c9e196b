"""Preference learning: a model and preference pairs in; a policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted, Row
from rlhf_core.models.vision import RowImages, open_processor
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.stages.reference import reference_of
from rlhf_core.supervised.encoding import read_examples, row_images
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.preference import PreferenceWorker
from rlhf_core.supervised.stored_examples import StoredExamples
from rlhf_core.supervised.stored_logprobs import read_logprobs, with_logprobs


def run(config: PreferenceConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder, reference = inputs["model"].folder, reference_of(config, inputs)
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)
    stored = read_logprobs(inputs[f"reference.logprobs.{name}"].folder for name in config.reference.logprobs)

    def read(dataset: Input) -> Fitted[StoredExamples]:
        encode = partial(_encoded, tokenizer, config, row_images(processor, dataset.folder))
        fitted = read_examples(dataset, encode, config, folder, context)
        if not config.reference.logprobs:
            return fitted
        return replace(fitted, rows=with_logprobs(fitted.rows, stored, "reference.logprobs"))

    return train_language_model(
        config, inputs, read, context, cluster, Kind.POLICY if config.lora is None else Kind.ADAPTER,
        worker=PreferenceWorker, arguments=[reference],
        pack=partial(pack_pairs, processor=processor),
    )  # fmt: skip


def _encoded(tokenizer: Tokenizer, config: PreferenceConfig, images: RowImages | None, row: Row) -> list[Example]:
    return [pair_example(tokenizer, config.as_read(row), images)]
