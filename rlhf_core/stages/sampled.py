"""Datasets from completions with rewards: pairs, labelled completions, the best ones, conditional text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    ConditionalPromptsConfig,
    FromCompletions,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import IMAGES_FOLDER, has_images, iterate_rows, require_seen_by_all, write_dataset
from rlhf_core.data.sampled import (
    Comparison,
    Outcome,
    best_of,
    by_reward,
    comparisons,
    conditional,
    counted_truncated,
    labelled,
    preferences,
    with_reward,
)
from rlhf_core.errors import NothingLeftError, StageError

_LEFT_OUT = ("equal_completions", "empty_completions", "truncated_completions")
_PAIR_COUNTS = ("ties", *_LEFT_OUT, "prompts_without_pair")
_JUDGED_COUNTS = (*_PAIR_COUNTS, "order_dependent", "unjudged")
_ROWS_AT_ONCE = 256  # per call of a judge with their pairs
_LABEL_COUNTS = ("desirable", "undesirable", "near_threshold", *_LEFT_OUT)
_BEST_COUNTS = (*_LEFT_OUT, "prompts_left_out")


def pairs(config: PairsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Make pairs.

    Raises NothingLeftError if no prompt has one, StageError if the judge exceeds its tolerated failures.
    """
    judge, every = config.judge, config.select == "all"
    counts = Counter(dict.fromkeys(_PAIR_COUNTS if judge is None else _JUDGED_COUNTS, 0))
    source = inputs["dataset"].folder
    _require_seen(config, source)
    completions = _completions(config, inputs, counts)
    preference_rows: list[Row] = []
    num_compared = 0
    with ExitStack() as stack:
        compare = _comparing(config, stack)
        while part := list(islice(completions, _ROWS_AT_ONCE)):
            compared = [
                pair for row in part for pair in comparisons(row, every=every, counts=counts, rewarded=judge is None)
            ]
            outcomes = compare(compared)
            preference_rows += preferences(compared, outcomes, counts, margin=config.write_margin)
            with_pair = {
                id(pair.row) for pair, outcome in zip(compared, outcomes, strict=True) if outcome in ("one", "other")
            }
            counts["prompts_without_pair"] += len(part) - len(with_pair)
            num_compared += len(compared)
    if judge is not None and counts["unjudged"] > judge.tolerated_failures * num_compared:
        raise StageError(
            f"the judge failed for {counts['unjudged']} of {num_compared} pairs, more than its `tolerated_failures` of "
            f"{judge.tolerated_failures:g}"
        )
    if not preference_rows:
        raise NothingLeftError(_no_pair(config, counts))
    return _dataset(config.made_format, preference_rows, counts, context, source)


def _completions(
    config: FromCompletions, inputs: Mapping[str, Input], counts: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the dataset, with their usable completions."""
    rows = iterate_rows(inputs["dataset"].folder)
    return (counted_truncated(row, counts, drop=config.drop_truncated) for row in rows)


def _require_seen(config: PairsConfig, folder: Path) -> None:
    """Raise StageError if prompts contain images, which the judge does not receive."""
    if config.text_readers and has_images(folder):
        require_seen_by_all(iterate_rows(folder), config.text_readers_of)


def _comparing(config: PairsConfig, stack: ExitStack) -> Callable[[Sequence[Comparison]], list[Outcome]]:
    if config.judge is None:
        return lambda compared: [by_reward(pair, config.margin) for pair in compared]
    from rlhf_core.rewards.judge import JudgeOfPairs

    judge = JudgeOfPairs(config.judge)
    stack.callback(judge.close)
    return judge


def _no_pair(config: PairsConfig, counts: Counter[str]) -> str:
    if config.judge is not None:
        return f"the judge prefers no completion of any prompt: {_listed(counts)}; look at its `template` and `pattern`"
    return (
        f"no prompt has two different completions whose rewards are more than {config.margin:g} apart: "
        f"{_listed(counts)}; sample more of each, at a higher temperature, or lower `margin`"
    )


def unpaired(config: UnpairedConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Label completions. Raises NothingLeftError unless there are completions of both labels."""
    counts = Counter(dict.fromkeys(_LABEL_COUNTS, 0))
    threshold, margin = config.threshold, config.margin
    rows = [
        labelled_row
        for row in _completions(config, inputs, counts)
        for labelled_row in labelled(row, threshold=threshold, margin=margin, counts=counts)
    ]
    for label, change in (("desirable", "lower"), ("undesirable", "raise")):
        if not counts[label]:
            raise NothingLeftError(
                f"no completion is {label} by a threshold of {threshold:g} and a margin of {margin:g}: "
                f"{_listed(counts)}; {change} `threshold`, or sample more of each prompt: KTO needs both"
            )
    return _dataset(config.made_format, rows, counts, context, inputs["dataset"].folder)


def best_of_n(config: BestOfNConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Select the best completions. Raises NothingLeftError if no prompt is left."""
    counts = Counter(dict.fromkeys(_BEST_COUNTS, 0))
    rows = [
        best
        for row in _completions(config, inputs, counts)
        for best in best_of(row, least_reward=config.least_reward, counts=counts)
    ]
    if not rows:
        if config.least_reward is None:
            raise NothingLeftError(f"every completion is empty: {_listed(counts)}; give it other rows")
        raise NothingLeftError(f"no prompt has a completion of this reward: {_listed(counts)}; lower `least_reward`")
    return _dataset(config.made_format, rows, counts, context, inputs["dataset"].folder)


def conditional_conversations(config: ConditionalConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Make conversations for conditional SFT: each prompt states the reward of its completion, and a model trained on
    them is prompted with a high one afterwards. Source: reward-conditioned sequence models, arXiv:2106.01345, on text.

    Raises NothingLeftError if there is no completion, or if all have one reward as formatted.
    """
    counts = Counter(dict.fromkeys(_LEFT_OUT, 0))
    written: Counter[str] = Counter()
    rows = [
        conversation
        for row in _completions(config, inputs, counts)
        for conversation in conditional(row, text=config.text, decimals=config.decimals, counts=counts, written=written)
    ]
    if len(written) < 2:
        rewards = f"all {len(rows)} completions have the reward {next(iter(written))}" if rows else "none is left"
        raise NothingLeftError(
            f"no completions of different rewards ({rewards}; {_listed(counts)}): there is no condition to learn: "
            "sample more of each prompt, at a higher temperature, or write more `decimals`"
        )
    counts["written_rewards"] = len(written)
    return _dataset(config.made_format, rows, counts, context, inputs["dataset"].folder)


def conditional_prompts(config: ConditionalPromptsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Add the reward to prompts. Raises StageError if a prompt has no message of the user."""
    rows = [
        with_reward(row, config.reward, text=config.text, decimals=config.decimals)
        for row in iterate_rows(inputs["dataset"].folder)
    ]
    return _dataset(config.made_format, rows, Counter(), context, inputs["dataset"].folder)


def _dataset(made_format: str, rows: list[Row], counts: Counter[str], context: StageContext, source: Path) -> Output:
    """Write a dataset of `rows`, with images from the dataset that they are made of."""
    folder = context.workdir / "dataset"
    images = write_dataset(folder, rows, {"format": made_format}, images_from=(source / IMAGES_FOLDER,))
    return Output(Kind.DATASET, folder, {"rows": len(rows), **counts, **images})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
