"""Preferences: two completions of one prompt, of which one is better."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.data.formats.answered import AnsweredFormat, read_answered
from rlhf_core.data.formats.base import Row, RowError, first_trained, number
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS
from rlhf_core.data.rendering import Tokenizer

_SIDES = ("chosen", "rejected")


class Preferences(AnsweredFormat):
    name = "preferences"
    reads = frozenset({*PROMPT_COLUMNS, *_SIDES, "margin", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        prompt, (chosen, rejected) = read_answered(row, _SIDES)
        if chosen.strip() == rejected.strip():
            raise RowError("`chosen` and `rejected` are the same")
        preference = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return preference | ({"margin": number(row["margin"], "margin")} if "margin" in row else {})

    def completions(self, row: Mapping[str, Any]) -> list[str]:
        return [row[side] for side in _SIDES]

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Something of the chosen completion, and one token in which the two differ."""
        (chosen, mask), (rejected, _) = self.encoded(tokenizer, row)
        both = min(len(chosen), len(rejected))
        differ = next((index for index in range(both) if chosen[index] != rejected[index]), both)
        return max(first_trained(mask), differ) + 1


def by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The pairs of each prompt, in their order."""
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[json.dumps(row["prompt"], sort_keys=True)].append(row)
    return groups
