"""Common part of the stages that train a reward model: examples in; a model with one score, and its scale out."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.config.stages.reward_models import SupervisedRewardConfig
from rlhf_core.config.stages.validation import MAIN
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted, Row
from rlhf_core.data.reading import iterate_rows
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import ADAPTER
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.vision import RowImages
from rlhf_core.stages.cluster import Cluster
from rlhf_core.supervised.encoding import read_examples
from rlhf_core.supervised.examples import Example, Packer
from rlhf_core.supervised.held_out import finish_folder, judgement, split_by_prompt
from rlhf_core.supervised.loop import train
from rlhf_core.supervised.scalar import ScalarWorker
from rlhf_core.supervised.stored_examples import StoredExamples
from rlhf_core.supervised.validation import Validation, read_held_out, row_counts
from rlhf_core.supervised.worker import divider
from rlhf_core.training.saving import save


def train_scalar_model(
    config: SupervisedRewardConfig,
    inputs: Mapping[str, Input],
    context: StageContext,
    cluster: Cluster,
    *,
    encode: Callable[..., list[Example]],
    pack: Packer,
    worker: type[ScalarWorker[Any]],
    counted: str,
    images: Callable[[Path], RowImages | None] | None = None,
    **stored: Any,
) -> Output:
    """Train the input `model` on the rows of the input `dataset`, encoded by `encode`.

    pack: makes the batches of a `worker`, one rank. counted: the noun for held-out items, as in the manifest. images:
    makes the reader of a dataset's images, of which `encode` gets it as `images`; None: rows have none. stored: further
    entries of the model's config.json.
    Raises StageError if all examples have one label.
    """
    model = inputs["model"]
    tokenizer = load_tokenizer(model.folder)

    def read(dataset: Input) -> Fitted[StoredExamples]:
        of_rows = {} if images is None else {"images": images(dataset.folder)}
        as_encoded = partial(_encoded, partial(encode, **of_rows), tokenizer, config)
        return read_examples(dataset, as_encoded, config, model.folder, context)

    fitted, validated = read(inputs["dataset"]), read_held_out(config, inputs, read)
    labels = {target for targets in fitted.rows.values("targets") for target in targets}
    if len(labels) == 1:
        raise StageError(f"of the dataset {config.one_label(*labels)}")
    examples: Sequence[Example]
    held_out: Sequence[Example]
    if validated:
        examples, held_out = fitted.rows, validated[MAIN].rows
    else:
        examples, held_out = split_examples(inputs["dataset"], fitted.rows, context.seed)
    if sum(len(example.targets) or len(example.sequences) for example in held_out) < 2:
        raise StageError(
            f"only one of the {counted} is held out, but a standard deviation needs two: "
            "give the dataset more prompts, or `validation` more rows"
        )

    folder = context.workdir / "reward_model"
    steps = config.count_steps(len(examples))
    context.progress(0, steps, "start workers")
    with cluster.workers(
        config.placement, config.engine, worker, config, context, model.manifest.ref, steps
    ) as workers:
        validation = Validation(config, validated, pack, workers, context) if validated else None
        metrics = train(config, examples, pack, workers, context, validation)
        if validation is None:
            shards = divider(config, workers)(pack(held_out[:]))
            judged = judgement(workers.scatter(ScalarWorker.validate, shards)[0])
        else:
            judged = judgement(validation.of_result)
        trained = folder if config.lora is None else folder / ADAPTER
        save(workers, trained, context)
    if config.lora is not None:
        merge_adapter(model.folder, trained, folder)
    context.log(steps, judged)
    scale = {name: judged[name] for name in ("reward_mean", "reward_std")}
    finish_folder(folder, tokenizer, **scale, **stored)
    counts = {f"held_out_{counted}": sum(len(example.targets) or 1 for example in held_out)}
    return Output(
        kind=Kind.REWARD_MODEL,
        folder=folder,
        metrics={**metrics, **judged, **counts, "steps": steps, **fitted.metrics(), **row_counts(validated)},
    )


def _encoded(
    encode: Callable[[Tokenizer, Row], list[Example]], tokenizer: Tokenizer, config: SupervisedRewardConfig, row: Row
) -> list[Example]:
    return encode(tokenizer, config.as_read(row))


def split_examples(dataset: Input, examples: StoredExamples, seed: int) -> tuple[StoredExamples, StoredExamples]:
    """Return examples to train on, and held-out examples, split by the prompts of the dataset's rows."""
    indices_of = defaultdict(list)
    for index, row_id in enumerate(examples.values("row_id")):
        indices_of[row_id].append(index)
    # A mix may repeat a row, all of whose examples go to one side.
    rows = {r["id"]: _prompt_part(r) for r in iterate_rows(dataset.folder) if r["id"] in indices_of}
    parts = split_by_prompt(list(rows.values()), seed)
    trained, held_out = (examples.select(i for row in part for i in indices_of[row["id"]]) for part in parts)
    return trained, held_out


def _prompt_part(row: Row) -> Row:
    """Return the part of the row that identifies its prompt."""
    prompt = json.dumps(row["prompt"], sort_keys=True)
    return {"id": row["id"], "prompt": hashlib.sha256(prompt.encode()).hexdigest()}
