"""Reward model: a model and preference pairs in; a model with one score out, and how large its rewards are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import RewardModelConfig
from rlhf_core.config.validation import MAIN
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.fitting import Fitted, Row
from rlhf_core.data.reading import iterate_rows, read_rows, row_policy
from rlhf_core.models.folder import ADAPTER
from rlhf_core.models.merging import merge_adapter
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.workers import save
from rlhf_core.supervised.examples import Example, fit_examples
from rlhf_core.supervised.loop import count_steps, train
from rlhf_core.supervised.pairs import pack_pairs
from rlhf_core.supervised.reward_model import (
    RewardModelWorker,
    finish_folder,
    judge,
    judged_by_validation,
    judged_pair,
    split_by_prompt,
)
from rlhf_core.supervised.validation import Validation, read_held_out, row_counts


def run(config: RewardModelConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    model = inputs["model"]
    tokenizer = load_tokenizer(model.folder)

    def encode(row: Row) -> list[Example]:
        return [judged_pair(tokenizer, row)]

    def read(dataset: Input) -> Fitted[Example]:
        rows, policy = iterate_rows(dataset.folder), row_policy(dataset.folder)
        return fit_examples(rows, encode, policy, model.folder, config.max_length)

    fitted, validated = read(inputs["dataset"]), read_held_out(config, inputs, read)
    examples, held_out = (fitted.rows, []) if validated else _split(inputs["dataset"], fitted.rows, context.seed)

    folder = context.workdir / "reward_model"
    steps = count_steps(len(examples), config)
    context.progress(0, steps, "start workers")
    ranks = cluster.workers(config.placement, RewardModelWorker, config, context, model.manifest.ref, steps)
    with ranks as workers:
        validation = Validation(config, validated, pack_pairs, workers, context) if validated else None
        metrics = train(config, examples, pack_pairs, workers, context, validation)
        if validation is None:
            judged = judge(config, held_out, workers)
        else:
            judged = judged_by_validation(len(validated[MAIN].rows), validation.of_result)
        trained = folder if config.lora is None else folder / ADAPTER
        save(workers, trained, context)
    if config.lora is not None:
        merge_adapter(model.folder, trained, folder)
    context.log(steps, {name: judged[name] for name in ("held_out_accuracy", "reward_mean", "reward_std")})
    finish_folder(folder, tokenizer, reward_mean=judged["reward_mean"], reward_std=judged["reward_std"])

    return Output(
        kind=Kind.REWARD_MODEL,
        folder=folder,
        metrics={**metrics, **judged, "steps": steps, **fitted.metrics(), **row_counts(validated)},
    )


def _split(dataset: Input, fitted: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Pairs to train on, and pairs that are held out, by the prompts of the dataset's rows."""
    example_of = {example.row_id: example for example in fitted}
    parts = split_by_prompt([row for row in read_rows(dataset.folder) if row["id"] in example_of], seed)
    trained, held_out = ([example_of[row["id"]] for row in part] for part in parts)
    return trained, held_out
