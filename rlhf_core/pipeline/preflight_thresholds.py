"""Thresholds on rewards before anything runs: can any reward of the recipe, or of the rows at hand, reach them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.data import DatasetConfig
from rlhf_core.config.rewards import EnvironmentReward, RewardConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    FromCompletions,
    GenerateConfig,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.config.shaping import ShapingConfig
from rlhf_core.data.sampled import best_of, by_reward, comparisons, conditional, counted_truncated, labelled
from rlhf_core.errors import StageError
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.samples import Located

Bounds = tuple[float, float]  # the lowest and the highest that a reward may be


def check_thresholds(
    nodes: Mapping[str, Draft], rows: Mapping[str, int], samples: Mapping[str, list[Located]]
) -> Iterator[str]:
    """rows: of each dataset whose rows could be counted. samples: the rows of each that could be read."""
    for node in nodes.values():
        config = node.config
        if isinstance(config, FromCompletions):
            made_by = nodes[node.inputs["dataset"]]
            problem = None
            if isinstance(made_by.config, GenerateConfig) and made_by.config.rewards:
                bounds = bounds_of_sum(made_by.config.rewards.values())
                problem = None if bounds is None else _unreachable(config, *bounds)
            elif isinstance(made_by.config, DatasetConfig):
                name = made_by.name.removeprefix("data.")
                known = samples.get(name, [])
                problem = _unrewarded(config, known)
                if problem is None and known and len(known) == rows.get(name):
                    try:
                        problem = _nothing_left(config, [row for _, row in known], name)
                    except StageError as error:
                        problem = f"dataset: {error}"
            if problem is not None:
                yield f"{node.section}.{problem}"
        elif isinstance(config, RLConfig):
            for problem in _of_rl(config):
                yield f"{node.section}.{config.block}.{problem}"


def _unreachable(config: FromCompletions, low: float, high: float) -> str | None:
    """Why nothing would be left of completions with rewards from `low` to `high`."""
    rewards = f"the rewards of its completions are from {low:g} to {high:g}"
    match config:
        case PairsConfig(judge=None, margin=margin) if margin >= high - low:
            return f"margin is {margin:g}, and {rewards}: no two are further apart than that: lower it"
        case BestOfNConfig(least_reward=least) if least is not None and least > high:
            return f"least_reward is {least:g}, and {rewards}: nothing would be left: lower it"
        case UnpairedConfig(threshold=threshold, margin=margin):
            place = f"threshold is {threshold:g}" + (f", with a margin of {margin:g}" if margin else "")
            if high < threshold or high - threshold < margin:
                return f"{place}, and {rewards}: none would be good: lower it"
            if low >= threshold or threshold - low < margin:
                return f"{place}, and {rewards}: none would be bad: raise it"
    return None


def _unrewarded(config: FromCompletions, known: list[Located]) -> str | None:
    for where, row in known if config.reads_rewards else []:
        if any("reward" not in entry for entry in row["completions"]):
            return f"dataset: {where}: a completion has no `reward`, which this stage reads"
    return None


def _nothing_left(config: FromCompletions, rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Why the stage would be left with nothing of all the rows of a dataset."""
    counts: Counter[str] = Counter()
    rows = [counted_truncated(row, counts, drop=config.drop_truncated) for row in rows]
    match config:
        case PairsConfig(select=select, margin=margin, judge=judge):
            compared = (
                pair
                for row in rows
                for pair in comparisons(row, every=select == "all", counts=counts, rewarded=judge is None)
            )
            if not any(judge is not None or by_reward(pair, margin) != "ties" for pair in compared):
                apart = "" if judge is not None else f" whose rewards are more than {margin:g} apart"
                return f"margin: no prompt of `{name}` has two different completions{apart}, so there is no pair"
        case BestOfNConfig(least_reward=least):
            if not any(True for row in rows for _ in best_of(row, least_reward=least, counts=counts)):
                if least is None:
                    return f"dataset: every completion of `{name}` is empty: give it other rows"
                return f"least_reward is {least:g}, and no completion of `{name}` has as much: lower it"
        case UnpairedConfig(threshold=threshold, margin=margin):
            made = [made for row in rows for made in labelled(row, threshold=threshold, margin=margin, counts=counts)]
            labels = {row["label"] for row in made}
            if len(labels) < 2:
                lacking = "bad: raise it" if True in labels else "good: lower it"
                place = f"threshold is {threshold:g}" + (f", with a margin of {margin:g}" if margin else "")
                return f"{place}, by which no completion of `{name}` is {lacking}"
        case ConditionalConfig(text=text, decimals=decimals):
            written: Counter[str] = Counter()
            for row in rows:
                list(conditional(row, text=text, decimals=decimals, counts=counts, written=written))
            if len(written) < 2:
                return (
                    f"decimals is {decimals}, with which the rewards of `{name}` are all written alike: write more, or "
                    "give it other rows"
                )
    return None


def _of_rl(config: RLConfig) -> Iterator[str]:
    settings = config.settings
    bounds = bounds_of_sum(settings.rewards.values(), environment=config.environment.bounds)
    if bounds is None:
        return
    clip = settings.shaping.clip
    shaped = _shaped(bounds, settings.shaping)
    if shaped[0] == shaped[1] and settings.rewards and settings.teacher is None:
        yield f"rewards: all completions get the reward {shaped[0]:g}, so that nothing tells them apart: add another"
        return
    if clip is not None and (shaped[0] >= clip[1] or shaped[1] <= clip[0]):
        yield (
            f"shaping.clip is [{clip[0]:g}, {clip[1]:g}], rewards are from {shaped[0]:g} to {shaped[1]:g}: all would "
            "be the same, and nothing would be learned: give it a range within these"
        )
    least = None if settings.cross_entropy is None else settings.cross_entropy.least_reward
    highest = shaped[1] if clip is None else min(shaped[1], clip[1])
    if least is not None and not settings.shaping.normalize and least > highest:
        yield (
            f"cross_entropy.least_reward is {least:g}, and rewards are at most {highest:g}: no completion would be "
            "imitated: lower it"
        )


def bounds_of_sum(rewards: Iterable[RewardConfig], *, environment: Bounds | None = None) -> Bounds | None:
    """The lowest and the highest sum of the rewards, each by its weight; None: not known before they are given.

    environment: what that gives in an episode, at least and at most.
    """
    low = high = 0.0
    for reward in rewards:
        bounds = reward.bounds or (environment if isinstance(reward, EnvironmentReward) else None)
        if reward.weight == 0:
            continue
        if bounds is None:
            return None
        ends = [reward.weight * bound for bound in bounds]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _shaped(bounds: Bounds, shaping: ShapingConfig) -> Bounds:
    """Before `clip` and `normalize`."""
    low, high = bounds
    if shaping.overlong is not None:
        low -= shaping.overlong.penalty
    if shaping.truncation is not None and shaping.truncation.reward is not None:
        low, high = min(low, shaping.truncation.reward), max(high, shaping.truncation.reward)
    elif shaping.truncation is not None and shaping.truncation.factor is not None and low > 0:
        low *= shaping.truncation.factor
    return low, high
