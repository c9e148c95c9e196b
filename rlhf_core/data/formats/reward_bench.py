"""RewardBench: completions of one prompt that are chosen, and others that are rejected, to judge reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.formats.answered import AnsweredFormat, read_answered
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, filled
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS

_SIDES = ("chosen", "rejected")
NO_SUBSET = "all"


class RewardBench(AnsweredFormat):
    """RewardBench has one completion on each side, RewardBench 2 lists of them. Every chosen one is better than every
    rejected one.
    """

    name = "reward_bench"
    reads = frozenset({*PROMPT_COLUMNS, *_SIDES, "subset", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        sides = {side: _texts(row, side) for side in _SIDES}
        read = [read_answered({**row, "completion": text}, ("completion",)) for side in _SIDES for text in sides[side]]
        prompt, _ = read[0]
        if any(other != prompt for other, _ in read):
            raise RowError("`chosen` and `rejected` do not answer the same prompt")
        texts, chosen = [text for _, (text,) in read], len(sides["chosen"])
        if {text.strip() for text in texts[:chosen]} & {text.strip() for text in texts[chosen:]}:
            raise RowError("a completion is in `chosen` and in `rejected`")
        subset = NO_SUBSET if row.get("subset") is None else filled(row, "subset")
        return {"prompt": prompt, "completions": [{"text": t} for t in texts], "chosen": chosen, "subset": subset}

    def completions(self, row: Mapping[str, Any]) -> list[str]:
        return [each["text"] for each in row["completions"]]


def _texts(row: Row, side: str) -> list[Any]:
    """Return the completions of one side: texts, or conversations that end with them."""
    value = row.get(side)
    if value is None:
        raise MissingColumnError(side, row)
    several = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    if several and not value:
        raise RowError(f"`{side}` has no completion")
    return list(value) if several else [value]
