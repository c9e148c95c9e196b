"""Thresholds on rewards before anything runs: can any reward of the recipe, or of the rows at hand, reach them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.config.data import DatasetConfig
from rlhf_core.config.rewards import bounds_of_sum
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.sampled import BestOfNConfig, FromCompletions, GenerateConfig, PairsConfig, UnpairedConfig
from rlhf_core.config.shaping import ShapingConfig
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.preflight_data import Located

Bounds = tuple[float, float]  # the lowest and the highest that a reward may be


def check_thresholds(
    nodes: Mapping[str, Draft], rows: Mapping[str, int], samples: Mapping[str, list[Located]]
) -> Iterator[str]:
    """rows: of each dataset whose rows could be counted. samples: the rows of each that could be read."""
    for node in nodes.values():
        config = node.config
        if isinstance(config, FromCompletions):
            made_by = nodes[node.inputs["dataset"]]
            if isinstance(made_by.config, GenerateConfig) and made_by.config.rewards:
                bounds = bounds_of_sum(made_by.config.rewards.values())
                known = None if bounds is None else _Rewards(*bounds, bounds[1] - bounds[0])
            else:
                known = _of_rows(made_by, rows, samples)
            problem = None if known is None else _unreachable(config, known)
            if problem is not None:
                yield f"{node.section}.{problem}"
        elif isinstance(config, RLConfig):
            for problem in _of_rl(config):
                yield f"{node.section}.{config.block}.{problem}"


@dataclass(frozen=True, slots=True)
class _Rewards:
    low: float
    high: float
    gap: float  # the largest between two completions of one prompt

    def __str__(self) -> str:
        return f"the rewards of its completions are from {self.low:g} to {self.high:g}"


def _of_rows(made_by: Draft, rows: Mapping[str, int], samples: Mapping[str, list[Located]]) -> _Rewards | None:
    """Of a dataset all of whose rows could be read."""
    name = made_by.name.removeprefix("data.")
    known = samples.get(name, [])
    if not isinstance(made_by.config, DatasetConfig) or not known or len(known) != rows.get(name):
        return None
    given: list[Sequence[float]] = [
        [each["reward"] for each in row["completions"] if "reward" in each] for _, row in known if "completions" in row
    ]
    rewards = [reward for each in given for reward in each]
    return _Rewards(min(rewards), max(rewards), max(max(e) - min(e) for e in given if e)) if rewards else None


def _unreachable(config: FromCompletions, rewards: _Rewards) -> str | None:
    """Why the stage would be left with nothing."""
    match config:
        case PairsConfig(judge=None, margin=margin) if margin >= rewards.gap:
            return f"margin is {margin:g}, and {rewards}: no two of one prompt are further apart than that: lower it"
        case BestOfNConfig(least_reward=least) if least is not None and least > rewards.high:
            return f"least_reward is {least:g}, and {rewards}: nothing would be left: lower it"
        case UnpairedConfig(threshold=threshold, margin=margin):
            place = f"threshold is {threshold:g}" + (f", with a margin of {margin:g}" if margin else "")
            if rewards.high < threshold or rewards.high - threshold < margin:
                return f"{place}, and {rewards}: none would be good: lower it"
            if rewards.low >= threshold or threshold - rewards.low < margin:
                return f"{place}, and {rewards}: none would be bad: raise it"
    return None


def _of_rl(config: RLConfig) -> Iterator[str]:
    settings = config.settings
    bounds = bounds_of_sum(settings.rewards.values(), environment=config.environment.bounds)
    if bounds is None:
        return
    clip = settings.shaping.clip
    shaped = _shaped(bounds, settings.shaping)
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
