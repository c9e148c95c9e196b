"""Reward model: a model and preference pairs in; a model with one score out, and how large its rewards are."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import RewardModelConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.reading import long_row_policy, read_rows
from rlhf_core.models.merging import merge_adapter
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.workers import save
from rlhf_core.supervised.loop import count_steps, require_fit, train
from rlhf_core.supervised.reward_model import (
    RewardModelWorker,
    finish_folder,
    judge,
    pack_pairs,
    pair_examples,
    split_by_prompt,
)


def run(config: RewardModelConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    model = inputs["model"]
    tokenizer = load_tokenizer(model.folder)
    dataset = inputs["dataset"].folder
    rows = read_rows(dataset)
    fitted = require_fit(pair_examples(tokenizer, rows), model.folder, config.max_length, long_row_policy(dataset))
    example_of = {example.row_id: example for example in fitted.rows}
    trained_rows, held_out_rows = split_by_prompt([row for row in rows if row["id"] in example_of], context.seed)
    examples, held_out = ([example_of[row["id"]] for row in part] for part in (trained_rows, held_out_rows))

    folder = context.workdir / "reward_model"
    steps = count_steps(len(examples), config)
    context.progress(0, steps, "start workers")
    ranks = cluster.workers(config.placement, RewardModelWorker, config, context, model.manifest.ref, steps)
    with ranks as workers:
        metrics = train(config, examples, pack_pairs, workers, context)
        metrics |= judge(config, held_out, workers)
        trained = folder if config.lora is None else context.workdir / "adapter"
        save(workers, trained, context)
    if config.lora is not None:
        merge_adapter(model.folder, trained, folder)
    context.log(steps, {name: metrics[name] for name in ("held_out_accuracy", "reward_mean", "reward_std")})
    finish_folder(folder, tokenizer, reward_mean=metrics["reward_mean"], reward_std=metrics["reward_std"])

    return Output(
        kind=Kind.REWARD_MODEL,
        folder=folder,
        metrics={**metrics, "steps": steps, **fitted.metrics()},
    )
