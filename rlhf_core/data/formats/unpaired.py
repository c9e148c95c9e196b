"""Unpaired preferences: a completion of a prompt, labelled good or bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_core.chat.sampled_tokens import SampledReply, sampled_reply
from rlhf_core.data.formats.answered import AnsweredFormat, read_answered
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS

_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


class Unpaired(AnsweredFormat):
    name = "unpaired"
    has_images = True
    reads = frozenset({*PROMPT_COLUMNS, "completion", "label", "images", "image", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        prompt, (completion,) = read_answered(row, ("completion",))
        if row.get("label") is None:
            raise MissingColumnError("label", row)
        return {"prompt": prompt, "completion": completion, "label": _label(row["label"])}

    def completions(self, row: Mapping[str, Any]) -> list[str]:
        return [row["completion"]]

    def sampled(self, row: Mapping[str, Any]) -> list[SampledReply | None]:
        return [sampled_reply(row, "completion")]


def _label(value: Any) -> bool:
    """Read true or false, also as 1 and 0 and as text, as in CSV."""
    is_scalar = isinstance(value, str | int | float | np.bool_)
    label = _LABELS.get(str(value).strip().lower()) if is_scalar else None
    if label is None:
        shown = repr(value)[:40]
        raise RowError(f"`label` must be true or false, this is {shown}", "`label` is neither true nor false")
    return label
