"""Checks of supervised stages: their models, and the rows that each needs."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.rewards.rewards import ModelReward
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardModelConfig, SupervisedRewardConfig
from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.data.formats.preferences import by_prompt
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.readers import separator_problem
from rlhf_core.models.folders.targets import head_problems
from rlhf_core.preflight.stages.context import CheckContext, Note
from rlhf_core.preflight.stages.trained import adapter_problems, engine_problems, few_rows


def check(config: SupervisedConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from engine_problems(config.engine, node, context)
    yield from adapter_problems(config.adapter, "lora", "model", node, context)
    smaller = "each epoch is one smaller step"
    yield from few_rows(config.dataset, "batch_size", config.batch_size, smaller, node, context)


def reward_regression(config: SupervisedRewardConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from check(config, node, context)
    dataset = config.dataset
    if not config.splits_by_prompt("dataset") or dataset not in context.rows:
        return
    if min(context.rows[dataset], len(by_prompt(row for _, row in context.samples[dataset]))) == 1:
        yield (
            f"{node.section}.dataset: `{dataset}` has the rows of one prompt, and of the prompts some are held out to "
            f"judge the model by: give it more, or {node.section}.validation a dataset of its own"
        )


def reward_model(config: RewardModelConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from reward_regression(config, node, context)
    model = context.models.get(node.name)
    if config.language_model_coefficient > 0 and model is not None:
        tied = model.settings.get("tie_word_embeddings", True)  # left out: only the model's class knows
        for problem in head_problems(tied=tied):
            yield f"{node.section}.language_model_coefficient: {problem}"


def process_reward_model(config: ProcessRewardModelConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from reward_regression(config, node, context)
    for other in context.nodes.values():
        for judged in other.config.judges():
            reward = judged.judge
            if isinstance(reward, ModelReward) and other.inputs[f"{judged.setting}.model"] == node.name:
                problem = separator_problem(config.separator, reward)
                yield from () if problem is None else (f"{other.section}.{judged.setting}: {problem}",)


def preference(config: PreferenceConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from check(config, node, context)
    yield from unread_rows(config, node, context)
    if config.margin_losses:
        return
    for setting in node.input_settings:
        rows = context.samples.get(setting.names[0], []) if setting.reads.format and setting.names else []
        if any("margin" in row for _, row in rows):
            yield Note(f"{node.section}.{setting.path}: no loss of this stage reads the `margin` of rows")


def unread_rows(config: StageConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield a problem for rows without stored log-probs in the stages that it names."""
    stored = [
        context.nodes[node.inputs[name]]
        for setting in node.input_settings
        if setting.reads.role == "logprobs" and setting.names
        for name in setting.input_names
    ]
    read = {reader.name: reader.inputs.get("dataset", "").removeprefix("data.") for reader in stored}
    complete = {name: rows for name, rows in context.samples.items() if len(rows) == context.rows.get(name)}
    if not read or not complete.keys() >= set(read.values()):
        return
    ids = {row["id"] for dataset in read.values() for _, row in complete[dataset]}
    for setting in node.input_settings:
        name = setting.names[0] if setting.reads.role == "dataset" and setting.names else ""
        if name not in complete or context.recipe.data[name].on_long_row == "drop":
            continue
        missing = next((where for where, row in complete[name] if row["id"] not in ids), None)
        if missing is not None:
            yield (
                f"{node.section}.{setting.path}: {missing} of `{name}` has no log-probs of the reference: "
                f"{', '.join(read)} has read other rows: have it read this dataset too"
            )
