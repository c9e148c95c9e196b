"""Unpaired preferences: a completion of a prompt, and whether it is a good one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.chat import encode_completion
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, first_trained
from rlhf_core.data.formats.messages import (
    BESIDE_MESSAGES,
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    MessageFormat,
    prompt_column,
    read_completion,
    read_prompt,
)
from rlhf_core.data.rendering import Tokenizer

_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


class Unpaired(MessageFormat):
    name = "unpaired"
    column = "prompt"
    reads = frozenset({*PROMPT_COLUMNS, "completion", "label", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        for column in ("completion", "label"):
            if row.get(column) is None:
                raise MissingColumnError(column, row)
        before, completion = read_completion(row["completion"], "completion")
        stated = prompt_column(row) not in (None, *MESSAGE_COLUMNS)
        prompt = read_prompt(row) if stated or not before else before
        if before and prompt != before:
            raise RowError("`prompt` is not what `completion` answers")
        return {"prompt": prompt, "completion": completion, "label": _label(row["label"])}

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join([super().whole_text(row), row["completion"]])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return len(encode_completion(tokenizer, row["prompt"], row["completion"], row.get("tools"))[0])

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return first_trained(encode_completion(tokenizer, row["prompt"], row["completion"], row.get("tools"))[1]) + 1


def _label(value: Any) -> bool:
    """True or false, also as 1 and 0 and as text, as CSV has them."""
    label = _LABELS.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if label is None:
        shown = repr(value)[:40]
        raise RowError(f"`label` must be true or false, this is {shown}", "`label` is neither true nor false")
    return label


def one_label(label: bool) -> str:
    """Why a dataset all of whose rows have this label teaches nothing."""
    return (
        f"every row has the label {str(label).lower()}: KTO learns what tells good completions from bad ones; add rows "
        "of the other label, or use SFT where all are good"
    )
