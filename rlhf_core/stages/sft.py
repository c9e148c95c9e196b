"""SFT: a model and conversations in; a policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.models.vision import open_processor
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.supervised.encoding import read_examples, row_images
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.supervised.stored_examples import StoredExamples


def run(config: SFTConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder = inputs["model"].folder
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)

    def read(dataset: Input) -> Fitted[StoredExamples]:
        encode = partial(conversation_examples, tokenizer, images=row_images(processor, dataset.folder))
        return read_examples(dataset, encode, config, folder, context)

    kind = Kind.POLICY if config.lora is None else Kind.ADAPTER
    pack = partial(pack_sequences, processor=processor)
    return train_language_model(config, inputs, read, context, cluster, kind, pack=pack)
