"""Conditional SFT: prompts that say the reward of the completion, as datasets.

A model that is trained on them is asked for a high reward afterwards. Source: reward-conditioned sequence models, Chen
et al. 2021 (arXiv:2106.01345), on text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.sampled import ConditionalConfig, ConditionalPromptsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import iterate_rows, write_dataset
from rlhf_core.data.sampled import conditional, with_reward
from rlhf_core.errors import NothingLeftError

_COUNTS = ("equal_completions", "empty_completions")


def conversations(config: ConditionalConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Raises NothingLeftError if there is no completion, or if all have one reward as it is written."""
    counts = Counter(dict.fromkeys(_COUNTS, 0))
    written: Counter[str] = Counter()
    rows = [
        made
        for row in iterate_rows(inputs["dataset"].folder)
        for made in conditional(row, text=config.text, decimals=config.decimals, counts=counts, written=written)
    ]
    if len(written) < 2:
        rewards = f"all {len(rows)} completions have the reward {next(iter(written))}" if rows else "none is left"
        listed = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        raise NothingLeftError(
            f"no completions of different rewards ({rewards}; {listed}): there is no condition to learn: sample more "
            "of each prompt, at a higher temperature, or write more `decimals`"
        )
    return _dataset(config.made_format, rows, context, {**counts, "written_rewards": len(written)})


def prompts(config: ConditionalPromptsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Raises StageError if a prompt has no message of the user."""
    asked = (
        with_reward(row, config.reward, text=config.text, decimals=config.decimals)
        for row in iterate_rows(inputs["dataset"].folder)
    )
    return _dataset(config.made_format, asked, context, {})


def _dataset(made_format: str, rows: Iterable[Row], context: StageContext, counts: Mapping[str, int]) -> Output:
    folder = context.workdir / "dataset"
    made = list(rows)
    write_dataset(folder, made, {"format": made_format})
    return Output(Kind.DATASET, folder, {"rows": len(made), **counts})
