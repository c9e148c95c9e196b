"""KTO: a model and labelled completions in; a policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.errors import StageError
from rlhf_core.models.vision import open_processor
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.stages.reference import reference_of
from rlhf_core.supervised.encoding import one_example, read_examples, row_images
from rlhf_core.supervised.kto import KTOWorker, labelled_example, pack_unpaired
from rlhf_core.supervised.stored_examples import StoredExamples


def run(config: KTOConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Train the model.

    Raises StageError if all rows that fit have one label, or one row of a validation set is left.
    """
    folder, reference = inputs["model"].folder, reference_of(config, inputs)
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)
    labels: Counter[bool] = Counter()

    def read(dataset: Input) -> Fitted[StoredExamples]:
        encode = partial(one_example, labelled_example, tokenizer, images=row_images(processor, dataset.folder))
        fitted = read_examples(dataset, encode, config, folder, context)
        if dataset is inputs["dataset"]:
            labels.update(fitted.rows.values("desirable"))
            if len(labels) == 1:
                raise StageError(f"of the dataset {config.one_label(*labels)}")
        elif len(fitted.rows) < config.SMALLEST_STEP:
            raise StageError(
                "it has one row that fits, but the KL is estimated with the completions of others: add rows"
            )
        return fitted

    output = train_language_model(
        config, inputs, read, context, cluster, Kind.POLICY if config.lora is None else Kind.ADAPTER,
        worker=KTOWorker, arguments=[reference],
        pack=partial(pack_unpaired, max_length=config.max_length, processor=processor),
    )  # fmt: skip
    counts = {"desirable_rows": labels[True], "undesirable_rows": labels[False]}
    return replace(output, metrics={**output.metrics, **counts})
