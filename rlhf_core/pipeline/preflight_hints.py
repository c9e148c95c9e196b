"""Hints of teachers before anything runs: every row must have what they write, and leave room for it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import encode_prompt
from rlhf_core.data.hints import told
from rlhf_core.errors import ConversationError
from rlhf_core.pipeline.preflight_data import Use
from rlhf_core.pipeline.preflight_lengths import tokenizer_of
from rlhf_core.pipeline.preflight_model import BaseModel
from rlhf_core.pipeline.recipe import Recipe
from rlhf_core.pipeline.samples import Located
from rlhf_core.rewards.template_trial import template_problem
from rlhf_core.rewards.templates import hint_of

_TRIED_ROWS = 20  # whose hint is first written in a process of its own
_TOKENISED_ROWS = 1000  # of each dataset, those with the longest hints


def check_hints(
    recipe: Recipe, uses: list[Use], samples: Mapping[str, list[Located]], models: Mapping[str, BaseModel], root: Path
) -> Iterator[str]:
    """One sentence for each stage with a hint that a row of its dataset cannot have, as far as rows are at hand."""
    for use in uses:
        config = use.node.config
        if not isinstance(config, RLConfig) or use.read_by.path != "dataset":
            continue
        teacher = config.settings.teacher
        if teacher is None or teacher.hint is None:
            continue
        problem = _problem(recipe, use, teacher.hint, samples.get(use.dataset, []), models.get(use.node.name), root)
        if problem is not None:
            yield f"{use.node.section}.{config.block}.teacher.hint: `{use.dataset}`: {problem}"


def _problem(
    recipe: Recipe, use: Use, template: str, rows: list[Located], model: BaseModel | None, root: Path
) -> str | None:
    if endless := template_problem(template, [row for _, row in rows[:_TRIED_ROWS]], {}, lenient=True):
        return endless
    config, hint, hints = recipe.data[use.dataset], hint_of(template), {}
    for index, (where, row) in enumerate(rows):
        try:
            hints[index] = hint(row)
            told(row["prompt"], hints[index])
        except ConversationError as error:
            if config.on_bad_row == "error":
                return f"{where}: {error}"
    limit = use.node.config.row_limit("dataset")
    if model is None or limit is None or config.on_long_row != "error":
        return None
    tokenizer = tokenizer_of(model, root)
    for index in heapq.nlargest(_TOKENISED_ROWS, hints, key=lambda index: len(hints[index])):
        where, row = rows[index]
        tokens = len(encode_prompt(tokenizer, told(row["prompt"], hints[index]), row.get("tools")))
        if tokens > limit.room:
            return (
                f"{where} has {tokens} tokens with its hint, more than the {limit.room} that {limit.setting} leaves "
                f"beside {limit.completion_setting}: raise it, or set the dataset's on_long_row to drop"
            )
    return None
