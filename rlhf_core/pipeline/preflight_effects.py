"""What a recipe would do in vain: train on nothing, be tested on what it learned, make what nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.config.logprobs import LogprobsConfig
from rlhf_core.config.placement import Placement
from rlhf_core.config.reward_models import SupervisedRewardConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.config.sampled import ConditionalConfig, ConditionalPromptsConfig, GenerateConfig
from rlhf_core.config.training import SupervisedConfig
from rlhf_core.data.formats.preferences import by_prompt
from rlhf_core.pipeline.drafting import Draft, asked_dataset
from rlhf_core.pipeline.preflight_data import Use, splits_by_prompt
from rlhf_core.pipeline.recipe import Recipe
from rlhf_core.pipeline.samples import Located, Sample
from rlhf_core.pipeline.user_files import configs_below


def check_effects(
    recipe: Recipe,
    nodes: Mapping[str, Draft],
    uses: list[Use],
    rows: Mapping[str, int],
    samples: Mapping[str, list[Located]],
) -> Iterator[str]:
    """Problems. rows: of each dataset whose rows could be counted here. samples: the rows that could be read, so that
    `check_overlaps` has found what of them is tested."""
    for use in uses:
        one_label = _one_label(use, rows, samples)
        if one_label is not None:
            yield f"{use.setting}: of `{use.dataset}` {one_label}"
        if _judged_by_one(use, rows, samples):
            yield (
                f"{use.setting}: of `{use.dataset}` one label could be all that the model is judged by, and of one "
                "reward there is no deviation: give it more rows"
            )
        if not splits_by_prompt(use) or use.dataset not in rows:
            continue
        prompts = min(rows[use.dataset], len(by_prompt(row for _, row in samples[use.dataset])))
        if prompts == 1:
            yield (
                f"{use.setting}: `{use.dataset}` has the rows of one prompt, and of the prompts some are held out to "
                f"judge the model by: give it more, or {use.node.section}.validation a dataset of its own"
            )
    yield from _unread_rows(recipe, nodes, rows, samples)
    compared = [name for name, known in samples.items() if known]
    for name, by, on in _tested_on_what_is_trained(recipe, nodes):
        if name in recipe.data and name not in compared and recipe.data[name].on_overlap == "error":
            yield (
                f"{on}: `{name}` is what {by} trains on, so that the scores would show what was learned by heart: test "
                f"on another dataset, or set data.{name}.on_overlap to allow"
            )


def _one_label(use: Use, rows: Mapping[str, int], samples: Mapping[str, list[Located]]) -> str | None:
    """Why the labels of what is trained on teach nothing; None if they do, or not all of them are at hand."""
    config, known = use.node.config, samples.get(use.dataset, [])
    if not isinstance(config, SupervisedConfig) or use.read_by.path != "dataset":
        return None
    if rows.get(use.dataset) == 1 < len(known) and all(len(config.labels(row)) == 1 for _, row in known):
        return "one row is read, and so one label: read more"
    if len(known) != rows.get(use.dataset):
        return None
    labels = {label for _, row in known for label in config.labels(row)}
    return config.one_label(*labels) if len(labels) == 1 else None


def _judged_by_one(use: Use, rows: Mapping[str, int], samples: Mapping[str, list[Located]]) -> bool:
    """Whether what a reward model's rewards are normalised by may be a single one, of the rows that are all at hand."""
    config, known = use.node.config, samples.get(use.dataset, [])
    if not isinstance(config, SupervisedRewardConfig) or len(known) != rows.get(use.dataset):
        return False
    if use.read_by.path == "validation.dataset":
        return sum(len(config.labels(row)) for _, row in known) == 1
    prompts = by_prompt(row for _, row in known).values() if splits_by_prompt(use) else ()
    # Of two prompts either may be held out.
    return len(prompts) == 2 and min(sum(len(config.labels(row)) for row in group) for group in prompts) == 1


def _unread_rows(
    recipe: Recipe, nodes: Mapping[str, Draft], rows: Mapping[str, int], samples: Mapping[str, list[Located]]
) -> Iterator[str]:
    """Rows that a stage needs the stored log-probs of, and none of the stages that it names has read."""
    known = {name: located for name, located in samples.items() if len(located) == rows.get(name)}
    for node in nodes.values():
        makers = [nodes[name] for name in node.inputs.values()]
        read = {made.name: made.config.dataset for made in makers if isinstance(made.config, LogprobsConfig)}
        if not read or not known.keys() >= set(read.values()):
            continue
        ids = {row["id"] for dataset in read.values() for _, row in known[dataset]}
        for setting in node.input_settings:
            name = setting.names[0] if setting.reads.role == "dataset" and setting.names else ""
            if name not in known or recipe.data[name].on_long_row == "drop":
                continue
            missing = next((where for where, row in known[name] if row["id"] not in ids), None)
            if missing is not None:
                yield (
                    f"{node.section}.{setting.path}: {missing} of `{name}` has no log-probs of the reference: "
                    f"{', '.join(read)} has read other rows: have it read this dataset too"
                )


def effect_notes(recipe: Recipe, nodes: Mapping[str, Draft], rows: Mapping[str, int]) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    yield from _few_rows(nodes, rows)
    for name, by, on in _tested_on_what_is_trained(recipe, nodes):
        yield f"`{name}` is trained on ({by}) and tested on ({on}): the scores will show what was learned by heart"
    yield from _unused_datasets(recipe, nodes)
    yield from _counted_twice(nodes)
    yield from _asked_otherwise(nodes)
    yield from _too_many_threads(nodes)
    yield from _unread_models(recipe, nodes)
    if not any(isinstance(node.config, EvaluationConfig) for node in nodes.values()):
        yield "no stage `evaluation`: no model of this recipe is evaluated"


def _counted_twice(nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Rewards that are one reward by two names."""
    for node in nodes.values():
        if not isinstance(node.config, RLConfig | GenerateConfig):
            continue
        rewards = node.config.settings.rewards if isinstance(node.config, RLConfig) else node.config.rewards
        section = f"{node.section}.{node.config.block}" if isinstance(node.config, RLConfig) else node.section
        known: dict[str, str] = {}
        for name, reward in rewards.items():
            first = known.setdefault(reward.model_dump_json(exclude={"weight"}), name)
            if first != name:
                yield f"{section}.rewards: `{first}` and `{name}` are the same reward, which counts with both weights"


def _asked_otherwise(nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Rewards that are asked for in other words than they were trained on."""
    trained = {node.name: node.config for node in nodes.values() if isinstance(node.config, ConditionalConfig)}
    for node in nodes.values():
        asked = node.config
        if not isinstance(asked, ConditionalPromptsConfig) or not trained:
            continue
        if (asked.text, asked.decimals) not in {(made.text, made.decimals) for made in trained.values()}:
            yield (
                f"{node.section}: its `text` or `decimals` is not that of {', '.join(trained)}: the model is asked for "
                "a reward in another way than it was trained on"
            )


def _too_many_threads(nodes: Mapping[str, Draft]) -> Iterator[str]:
    cores = os.cpu_count() or 1
    for node in nodes.values():
        for below in configs_below(node.config):
            if isinstance(below, RolloutEngineConfig | Placement) and below.num_threads > cores:
                part, threads = "rollout" if isinstance(below, RolloutEngineConfig) else "placement", below.num_threads
                yield (
                    f"{node.section}.{part}: {threads} threads are more than this machine has cores, {cores}: in jobs "
                    "that run on it, they would wait for each other"
                )


def _few_rows(nodes: Mapping[str, Draft], rows: Mapping[str, int]) -> Iterator[str]:
    for node in nodes.values():
        config = node.config
        if isinstance(config, SupervisedConfig):
            needed, setting, then = config.batch_size, "batch_size", "each epoch is one smaller step"
        elif isinstance(config, RLConfig):
            needed, setting, then = config.prompts_per_step, "prompts_per_step", "a step has prompts more than once"
        else:
            continue
        known = rows.get(config.dataset, needed)
        if known < needed:
            yield f"{node.section}: `{config.dataset}` has {known} rows, fewer than {setting}={needed}: {then}"


def _tested_on_what_is_trained(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[tuple[str, str, str]]:
    """Each such dataset, the settings that train on it and those that test on it."""
    trained: dict[str, set[str]] = {}
    tested: dict[str, set[str]] = {}
    for node in nodes.values():
        for setting in node.input_settings:
            reads = setting.reads
            if reads.role == "dataset" and reads.format is not None and not reads.only_read:
                for name in {asked_dataset(recipe, name) for name in setting.names}:
                    uses = tested if reads.held_out else trained
                    uses.setdefault(name, set()).add(f"{node.section}.{setting.path}")
    for name in sorted(trained.keys() & tested.keys()):
        yield name, ", ".join(sorted(trained[name])), ", ".join(sorted(tested[name]))


def _unused_datasets(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[str]:
    unused = [name for name in recipe.data if f"data.{name}" not in nodes]
    if unused:
        yield f"no stage reads {', '.join(f'data.{name}' for name in unused)}"


def _unread_models(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Models that are no input of anything and not the last one, which is what the run is for."""
    read = {other for node in nodes.values() if not node.stage.reads_all for other in node.inputs.values()}
    made = [name for name, config in recipe.stages.items() if config.makes == "model" and name in nodes]
    for name in made[:-1]:
        if not {name, f"merge.{name}"} & (read - _merges(nodes, name)):
            yield f"nothing reads the result of `{name}`, and it is not the last model of the recipe"


def _merges(nodes: Mapping[str, Draft], name: str) -> set[str]:
    """`name`, if only its own merge reads it."""
    readers = [node.name for node in nodes.values() if not node.stage.reads_all and name in node.inputs.values()]
    return {name} if readers == [f"merge.{name}"] else set()


def bad_row_notes(samples: Mapping[str, Sample]) -> list[str]:
    """One sentence for each dataset whose job will drop bad rows, as far as its rows could be read here."""
    return [f"data.{name}: {sample.bad.sentence()}" for name, sample in samples.items() if sample.bad.count]
