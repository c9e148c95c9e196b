"""Preferences: two completions of one prompt, of which one is better."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.data.chat import encode_completion
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, first_trained, number
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

_SIDES = ("chosen", "rejected")


class Preferences(MessageFormat):
    name = "preferences"
    column = "prompt"
    reads = frozenset({*PROMPT_COLUMNS, *_SIDES, "margin", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        if "chosen" not in row or "rejected" not in row:
            raise MissingColumnError("rejected" if "chosen" in row else "chosen", row)
        chosen_before, chosen = read_completion(row["chosen"], "chosen")
        rejected_before, rejected = read_completion(row["rejected"], "rejected")
        if chosen_before != rejected_before:
            raise RowError("`chosen` and `rejected` do not answer the same prompt")
        stated = prompt_column(row) not in (None, *MESSAGE_COLUMNS)
        prompt = read_prompt(row) if stated or not chosen_before else chosen_before
        if chosen_before and prompt != chosen_before:
            raise RowError("`prompt` is not what `chosen` and `rejected` answer")
        if chosen.strip() == rejected.strip():
            raise RowError("`chosen` and `rejected` are the same")
        preference = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return preference | ({"margin": number(row["margin"], "margin")} if "margin" in row else {})

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join([super().whole_text(row), *(row[side] for side in _SIDES)])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return max(len(encode_completion(tokenizer, row["prompt"], row[side], row.get("tools"))[0]) for side in _SIDES)

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Something of the chosen completion, and one token in which the two differ."""
        encoded = [encode_completion(tokenizer, row["prompt"], row[side], row.get("tools")) for side in _SIDES]
        (chosen, mask), (rejected, _) = encoded
        both = min(len(chosen), len(rejected))
        differ = next((index for index in range(both) if chosen[index] != rejected[index]), both)
        return max(first_trained(mask), differ) + 1


def by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The pairs of each prompt, in their order."""
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[json.dumps(row["prompt"], sort_keys=True)].append(row)
    return groups
