"""Continued pre-training: a model and documents in, the same model with full weights out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import PretrainConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.lengths import Fitted, fit
from rlhf_core.data.reading import iterate_rows, long_row_policy
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.supervised.examples import Example, require_fit
from rlhf_core.supervised.sft import document_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def run(config: PretrainConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder = inputs["model"].folder
    tokenizer = load_tokenizer(folder)

    def read(dataset: Input) -> Fitted[Example]:
        documents = _documents(config, tokenizer, dataset)
        pieces = require_fit([piece for document in documents.rows for piece in document], folder, config.max_length)
        return Fitted(pieces.rows, documents.policy, documents.dropped, documents.truncated)

    return train_language_model(config, inputs, read, context, cluster, Kind.BASE_MODEL)


def _documents(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, dataset: Input) -> Fitted[list[Example]]:
    """Each document as the pieces it is split into; a policy of drop or truncate splits none."""
    policy = long_row_policy(dataset.folder)
    documents = (document_examples(tokenizer, [row], config.max_length) for row in iterate_rows(dataset.folder))
    if policy == "error":
        return Fitted(list(documents), policy)

    def problem(pieces: list[Example]) -> str | None:
        return None if len(pieces) <= 1 else f"document {pieces[0].row_id} is longer than {config.max_length} tokens"

    return fit(documents, policy, problem=problem, truncate=lambda pieces: pieces[:1])
