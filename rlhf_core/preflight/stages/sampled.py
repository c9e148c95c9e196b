"""Checks of datasets made from completions: whether rewards can reach their thresholds."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.stages.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    ConditionalPromptsConfig,
    FromCompletions,
    GenerateConfig,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.stages.bounds import Bounds, bounds_of_sum
from rlhf_core.preflight.stages.context import CheckContext, Note
from rlhf_core.preflight.texts import text_problem


def pairs(config: PairsConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    yield from rewarded(config, node, context)
    sampled = _sampled(node, context)
    if sampled is not None and sampled.samples == 1:
        yield (
            f"{node.section}.dataset: it has one completion of each prompt, of which no pair can be made: raise its "
            "`samples`"
        )
    bounds = _bounds(sampled)
    if bounds is not None and config.judge is None and config.margin >= bounds[1] - bounds[0]:
        yield (
            f"{node.section}.margin is {config.margin:g}, and {_rewards(bounds)}: no two are further apart than that: "
            "lower it"
        )
    if (judge := config.judge) is not None:
        two = {"first": "one completion", "second": "another one"}
        rows, tolerates = context.samples.get(config.dataset, []), judge.tolerated_failures > 0
        problem = text_problem(judge.template, rows, two, tolerates=tolerates)
        yield from () if problem is None else (f"{node.section}.judge.template: {problem}",)


def best_of_n(config: BestOfNConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    yield from rewarded(config, node, context)
    bounds, least = _bounds(_sampled(node, context)), config.least_reward
    if bounds is not None and least is not None and least > bounds[1]:
        yield f"{node.section}.least_reward is {least:g}, and {_rewards(bounds)}: nothing would be left: lower it"


def unpaired(config: UnpairedConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    yield from rewarded(config, node, context)
    bounds, threshold, margin = _bounds(_sampled(node, context)), config.threshold, config.margin
    if bounds is None:
        return
    low, high = bounds
    place = f"{node.section}.threshold is {threshold:g}" + (f", with a margin of {margin:g}" if margin else "")
    if high < threshold or high - threshold < margin:
        yield f"{place}, and {_rewards(bounds)}: none would be good: lower it"
    elif low >= threshold or threshold - low < margin:
        yield f"{place}, and {_rewards(bounds)}: none would be bad: raise it"


def rewarded(config: FromCompletions, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield a problem for completions without the rewards that the stage reads."""
    if not config.reads_rewards:
        return
    sampled = _sampled(node, context)
    if sampled is not None and not sampled.rewards:
        yield (
            f"{node.section}.dataset: its completions have no rewards, which this stage reads: give that stage "
            "`generate` rewards"
        )
    for where, row in context.samples.get(config.dataset, []):
        if any("reward" not in entry for entry in row["completions"]):
            yield f"{node.section}.dataset: {where}: a completion has no `reward`, which this stage reads"
            return


def conditional_prompts(config: ConditionalPromptsConfig, node: Draft, context: CheckContext) -> Iterator[Note]:
    """Yield a note if rewards are written differently than in the training prompts."""
    others = {other.name: other.config for other in context.nodes.values()}
    trained = {name: stage for name, stage in others.items() if isinstance(stage, ConditionalConfig)}
    if trained and (config.text, config.decimals) not in {(stage.text, stage.decimals) for stage in trained.values()}:
        yield Note(
            f"{node.section}: its `text` or `decimals` is not that of {', '.join(trained)}: the model is asked for a "
            "reward in another way than it was trained on"
        )


def _sampled(node: Draft, context: CheckContext) -> GenerateConfig | None:
    """Return the settings of the stage that samples the completions; None if they come from a file or an artifact."""
    made_by = context.nodes[node.inputs["dataset"]].config
    return made_by if isinstance(made_by, GenerateConfig) else None


def _bounds(sampled: GenerateConfig | None) -> Bounds | None:
    return bounds_of_sum(sampled.rewards.values()) if sampled is not None and sampled.rewards else None


def _rewards(bounds: Bounds) -> str:
    return f"the rewards of its completions are from {bounds[0]:g} to {bounds[1]:g}"
