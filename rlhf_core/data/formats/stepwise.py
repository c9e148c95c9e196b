"""Step labels: the steps of a completion, each labelled right or wrong, if it was judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.encoding import encode_completion
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.chat.step_tags import encode_tagged
from rlhf_core.chat.steps import step_tokens
from rlhf_core.config.texts import is_blank
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, number
from rlhf_core.data.formats.math_shepherd import COLUMNS, as_steps, is_math_shepherd
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS, MessageFormat, read_prompt
from rlhf_core.errors import ConversationError


class Stepwise(MessageFormat):
    """For tokenisation rows also have a `separator`, with which the stage that reads them joins the steps."""

    name = "stepwise"
    column = "prompt"
    reads = frozenset({*PROMPT_COLUMNS, "steps", "labels", *BESIDE_MESSAGES, *COLUMNS})

    def without_tools(self, row: Row) -> Row:
        if is_math_shepherd(row):
            row = as_steps(row)
        steps = [_step(value, f"steps[{index}]") for index, value in enumerate(_listed(row, "steps"))]
        labels = [_label(value, f"labels[{index}]") for index, value in enumerate(_listed(row, "labels"))]
        if len(steps) != len(labels):
            raise RowError(
                f"there are {len(steps)} `steps` and {len(labels)} `labels`: each step needs one",
                "`steps` and `labels` are not equally many",
            )
        if all(label is None for label in labels):
            raise RowError("`labels` are all null: no step was judged")
        return {"prompt": read_prompt(row), "steps": steps, "labels": labels}

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join([super().whole_text(row), *row["steps"]])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return len(encode_steps(tokenizer, row)[0])


def encode_steps(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return token ids of the prompt and the completion, up to the token that ends it, and the index of the last token
    of each step. row: with a `separator`; with a `step_tag`, the tags are read, and the ids end with the last one.

    Raises ConversationError if a reward that reads the completion would split it into other steps.
    """
    steps, separator = row["steps"], row["separator"]
    for index, step in enumerate(steps):
        if separator in step:
            raise ConversationError(
                f"steps[{index}] holds the separator {separator!r}, so it would be read as several steps: take it "
                "out, or set another `separator`"
            )
    if (tag := row.get("step_tag")) is not None:
        if (held := next((index for index, step in enumerate(steps) if tag in step), None)) is not None:
            raise ConversationError(f"steps[{held}] holds the tag {tag!r}: take it out, or set another `step_tag`")
        return encode_tagged(tokenizer, row["prompt"], steps, separator=separator, tag=tag, tools=row.get("tools"))
    ids, mask = encode_completion(tokenizer, row["prompt"], separator.join(steps), row.get("tools"))
    ends = step_tokens(tokenizer, ids, mask, separator)
    if len(ends) != len(steps):
        raise ConversationError(
            f"the tokens of the completion have {len(ends)} steps, and the row has {len(steps)}: the tokenizer or the "
            f"chat template loses a step or a separator {separator!r}; drop the row, or set another `separator`"
        )
    if len(set(ends)) < len(ends):
        raise ConversationError("two steps end in one token, which has one reward: set another `separator`")
    return ids[: ends[-1] + 1], ends


def _listed(row: Row, column: str) -> list[Any] | tuple[Any, ...]:
    value = row.get(column)
    if value is None:
        raise MissingColumnError(column, row)
    if not isinstance(value, list | tuple) or not value:
        shown = "has none" if isinstance(value, list | tuple) else f"is {type(value).__name__}"
        raise RowError(
            f"`{column}` must be a list with one entry a step, this {shown}", f"`{column}` is not a list of steps"
        )
    return value


def _step(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"`{where}` must be text, this is {type(value).__name__}", "`steps` has one that is not text")
    if is_blank(value):
        raise RowError(f"`{where}` is empty", "`steps` has an empty one")
    return value


def _label(value: Any, where: str) -> float | None:
    """Return a hard (true, false, 1, 0) or soft label between these; None if not judged, as steps after the first
    mistake.
    """
    if value is None:
        return None
    label = float(value) if isinstance(value, bool) else number(value, where)
    if not 0 <= label <= 1:
        raise RowError(f"`{where}` must be true, false or from 0 to 1, this is {label:g}", "`labels` has another value")
    return label
