"""What is made of completions with rewards: pairs, labelled completions, and the best of each prompt, as datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.sampled import BestOfNConfig, PairsConfig, UnpairedConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import iterate_rows, write_dataset
from rlhf_core.data.sampled import best_of, labelled, pairs_of
from rlhf_core.errors import StageError

_PAIR_COUNTS = ("ties", "equal_completions", "empty_completions", "prompts_without_pair")
_LABEL_COUNTS = ("desirable", "undesirable", "near_threshold", "equal_completions", "empty_completions")
_BEST_COUNTS = ("equal_completions", "empty_completions", "prompts_left_out")


def pairs(config: PairsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Raises StageError if no prompt has a pair."""
    counts = Counter(dict.fromkeys(_PAIR_COUNTS, 0))
    every = config.select == "all"
    rows = [
        pair
        for row in iterate_rows(inputs["dataset"].folder)
        for pair in pairs_of(row, every=every, margin=config.margin, counts=counts)
    ]
    if not rows:
        raise StageError(
            f"no prompt has two different completions whose rewards are more than {config.margin:g} apart: "
            f"{_listed(counts)}; sample more of each, at a higher temperature, or lower `margin`"
        )
    return _dataset(config.made_format, rows, counts, context)


def unpaired(config: UnpairedConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Raises StageError unless there are completions of both labels."""
    counts = Counter(dict.fromkeys(_LABEL_COUNTS, 0))
    threshold, margin = config.threshold, config.margin
    rows = [
        made
        for row in iterate_rows(inputs["dataset"].folder)
        for made in labelled(row, threshold=threshold, margin=margin, counts=counts)
    ]
    for label, change in (("desirable", "lower"), ("undesirable", "raise")):
        if not counts[label]:
            raise StageError(
                f"no completion is {label} by a threshold of {threshold:g} and a margin of {margin:g}: "
                f"{_listed(counts)}; {change} `threshold`, or sample more of each prompt: KTO needs both"
            )
    return _dataset(config.made_format, rows, counts, context)


def best_of_n(config: BestOfNConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Raises StageError if no prompt is left."""
    counts = Counter(dict.fromkeys(_BEST_COUNTS, 0))
    rows = [
        best
        for row in iterate_rows(inputs["dataset"].folder)
        for best in best_of(row, least_reward=config.least_reward, counts=counts)
    ]
    if not rows:
        raise StageError(f"no prompt has a completion of this reward: {_listed(counts)}; lower `least_reward`")
    return _dataset(config.made_format, rows, counts, context)


def _dataset(made_format: str, rows: list[Row], counts: Counter[str], context: StageContext) -> Output:
    folder = context.workdir / "dataset"
    write_dataset(folder, rows, {"format": made_format})
    return Output(Kind.DATASET, folder, {"rows": len(rows), **counts})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
