"""Preferences: two completions of one prompt, one of them better."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.chat.encoding import Completion, ended_completion
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.chat.sampled_tokens import sampled_reply
from rlhf_core.data.formats.answered import AnsweredFormat, read_answered
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, first_trained, reward_number
from rlhf_core.data.formats.messages import (
    BESIDE_MESSAGES,
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    Message,
    last_reply,
    prompt_column,
    read_messages,
    read_prompt,
)

_SIDES = ("chosen", "rejected")


class Preferences(AnsweredFormat):
    name = "preferences"
    has_images = True
    completions_with_images = _SIDES
    reads = frozenset({*PROMPT_COLUMNS, *_SIDES, "margin", "images", "image", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        chosen: Completion
        rejected: Completion
        if any(isinstance(row.get(side), list | tuple) and len(row[side]) > 1 for side in _SIDES):
            prompt, (chosen, rejected) = _split_prompt(row)
        elif prompt_column(row) is None and isinstance(row.get("chosen"), str):
            raise MissingColumnError("prompt", row, ", and `chosen` is not a list of messages that begins with it")
        else:
            prompt, (chosen, rejected) = read_answered(row, _SIDES)
        if isinstance(chosen, str) and isinstance(rejected, str) and chosen.strip() == rejected.strip():
            raise RowError("`chosen` and `rejected` are the same")
        preference = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return preference | ({"margin": reward_number(row["margin"], "margin")} if "margin" in row else {})

    def completions(self, row: Mapping[str, Any]) -> list[str]:
        return [_text(row[side]) for side in _SIDES]

    def asked_texts(self, row: Mapping[str, Any]) -> list[str]:
        turns = [message for side in _SIDES if not isinstance(row[side], str) for message in row[side]]
        return super().asked_texts(row) + [turn["content"] for turn in turns if turn["role"] == "user"]

    def encoded(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
        return [
            ended_completion(tokenizer, row["prompt"], row[side], row.get("tools"), sampled=sampled_reply(row, side))
            for side in _SIDES
        ]

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Return the tokens up to something of the chosen completion, and one token in which the two differ."""
        (chosen, mask), (rejected, _) = self.encoded(tokenizer, row)
        both = min(len(chosen), len(rejected))
        differ = next((index for index in range(both) if chosen[index] != rejected[index]), both)
        return max(first_trained(mask), differ) + 1


def _split_prompt(row: Row) -> tuple[list[Message], Sequence[Completion]]:
    """Return the common first turns of two conversations, which are the prompt, and the continuation of each."""
    if not all(isinstance(row.get(side), list | tuple) and row[side] for side in _SIDES):
        return read_answered(row, _SIDES)
    conversations = [read_messages(row[side], side) for side in _SIDES]
    stated = read_prompt(row) if prompt_column(row) not in (None, *MESSAGE_COLUMNS) else []
    whole = [[*stated, *turns] if stated and turns[0]["role"] == "assistant" else turns for turns in conversations]
    for side, turns in zip(_SIDES, whole, strict=True):
        last_reply(turns, side)
    both = min(map(len, whole))
    common = next((index for index in range(both) if whole[0][index] != whole[1][index]), both)
    prompt, rests = whole[0][:common], [turns[common:] for turns in whole]
    if whole[0] == whole[1]:
        raise RowError("`chosen` and `rejected` are the same")
    if not prompt or not all(rest and rest[0]["role"] == "assistant" for rest in rests):
        raise RowError("`chosen` and `rejected` do not answer the same prompt")
    if stated != prompt[: len(stated)]:
        raise RowError("`prompt` differs from the prompt in `chosen` and `rejected`")
    if max(map(len, rests)) > 1:
        return prompt, rests
    return prompt, [rest[0]["content"] for rest in rests]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else "\n".join(message["content"] for message in completion)


def by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the pairs of each prompt, in order."""
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[json.dumps(row["prompt"], sort_keys=True)].append(row)
    return groups
