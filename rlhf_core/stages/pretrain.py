"""Continued pre-training: a model and documents in, the same model with full weights out."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import PretrainConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.reading import read_rows
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.stages.workers import GroupFactory, ray_workers
from rlhf_core.supervised.sft import document_examples


def run(
    config: PretrainConfig, inputs: Mapping[str, Input], context: StageContext, group: GroupFactory = ray_workers
) -> Output:
    model = inputs["model"]
    rows = read_rows(inputs["dataset"].folder)
    examples = document_examples(load_tokenizer(model.folder), rows, config.max_length)
    return train_language_model(config, model, examples, context, group, Kind.BASE_MODEL)
