"""Checks of teachers' hints: every row must have the columns of their template, and leave room for them."""

from __future__ import annotations

import heapq

from rlhf_core.chat.encoding import encode_prompt
from rlhf_core.chat.hints import append_to_prompt
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.errors import ConversationError
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.model import BaseModel
from rlhf_core.preflight.stages.context import CheckContext
from rlhf_core.rewards.template_trial import template_problem
from rlhf_core.rewards.templates import hint_of

_TRIED_ROWS = 20  # whose hint is first written in a process of its own
_TOKENISED_ROWS = 1000  # of each dataset, those with the longest hints


def hint_problem(config: RLConfig, template: str, model: BaseModel | None, context: CheckContext) -> str | None:
    """Return the reason why a readable row of the stage's dataset cannot have the hint `template`; None if all can."""
    rows = context.samples.get(config.dataset)
    if rows is None:
        return None
    if endless := template_problem(template, [row for _, row in rows[:_TRIED_ROWS]], {}, lenient=True):
        return endless
    dataset, hint, hints = context.recipe.data[config.dataset], hint_of(template), {}
    for index, (where, row) in enumerate(rows):
        try:
            hints[index] = hint(row)
            append_to_prompt(row["prompt"], hints[index])
        except ConversationError as error:
            if dataset.on_bad_row == "error":
                return f"{where}: {error}"
    limit = config.row_limit("dataset")
    if model is None or limit is None or dataset.on_long_row != "error":
        return None
    tokenizer = tokenizer_of(model, context.root)
    for index in heapq.nlargest(_TOKENISED_ROWS, hints, key=lambda index: len(hints[index])):
        where, row = rows[index]
        tokens = len(encode_prompt(tokenizer, append_to_prompt(row["prompt"], hints[index]), row.get("tools")))
        if tokens > limit.room:
            return (
                f"{where} has {tokens} tokens with its hint, more than the {limit.room} that {limit.setting} leaves "
                f"beside {limit.completion_setting}: raise it, or set the dataset's on_long_row to drop"
            )
    return None
