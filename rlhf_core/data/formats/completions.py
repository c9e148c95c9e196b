"""Completions: several answers to one prompt, each with its reward, if any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.sampled_tokens import SampledReply, reply_of
from rlhf_core.data.formats.answered import AnsweredFormat, read_answered
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, number, reward_number
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS, read_prompt

_NUMBERS = {"reward": reward_number, "logprob": number, "reference_logprob": number}
FINISH_REASONS = ("stop", "length")
_ONE = ("completion", "reward")  # of a row with one completion


class Completions(AnsweredFormat):
    name = "completions"
    reads = frozenset({*PROMPT_COLUMNS, "completions", *_ONE, "tokenizer", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        if row.get("completion") is not None:
            return _one(row)
        if row.get("completions") is None:
            raise MissingColumnError("completions", row, " or `completion`")
        entries = row["completions"]
        if not isinstance(entries, list | tuple) or not entries:
            raise RowError("`completions` must be a list with at least one completion")
        completions = [_completion(each, f"completions[{index}]") for index, each in enumerate(entries)]
        of_tokens = {"tokenizer": str(row["tokenizer"])} if row.get("tokenizer") is not None else {}
        return {"prompt": read_prompt(row), "completions": completions, **of_tokens}

    def unread(self, columns: frozenset[str]) -> frozenset[str]:
        of_one = columns & ({"reward"} if "completion" not in columns else {"tokenizer"})
        return super().unread(columns) | of_one

    def completions(self, row: Mapping[str, Any]) -> list[str]:
        return [each["text"] for each in row["completions"]]

    def sampled(self, row: Mapping[str, Any]) -> list[SampledReply | None]:
        return [reply_of(each, row.get("tokenizer")) for each in row["completions"]]


def _one(row: Row) -> Row:
    """Convert a row with one `completion`, and perhaps its `reward`."""
    if row.get("completions") is not None:
        raise RowError("there are both `completions` and `completion`: remove one of them")
    prompt, (text,) = read_answered(row, ("completion",))
    reward = {"reward": reward_number(row["reward"], "reward")} if row.get("reward") is not None else {}
    return {"prompt": prompt, "completions": [{"text": text, **reward}]}


def _completion(value: Any, where: str) -> dict[str, Any]:
    """Read text, or {text, reward, rewards, logprob, reference_logprob, token_ids, finish_reason}, in which only the
    text is required.
    """
    entry = {"text": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not isinstance(entry.get("text"), str):
        raise RowError(f"`{where}` must be text, or a mapping with `text`", "`completions` has one without text")
    completion: dict[str, Any] = {"text": entry["text"]}
    for name in _NUMBERS:
        if entry.get(name) is not None:
            completion[name] = _NUMBERS[name](entry[name], f"{where}.{name}")
    completion |= _as_sampled(entry, where)
    rewards = entry.get("rewards")
    if rewards is not None:
        if not isinstance(rewards, Mapping):
            raise RowError(f"`{where}.rewards` must be a mapping from names to numbers")
        completion["rewards"] = {
            str(name): reward_number(value, f"{where}.rewards.{name}") for name, value in rewards.items()
        }
    return completion


def _as_sampled(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    sampled: dict[str, Any] = {}
    if (tokens := entry.get("token_ids")) is not None:
        if not isinstance(tokens, list | tuple) or not all(type(token) is int and token >= 0 for token in tokens):
            raise RowError(f"`{where}.token_ids` must be a list of token numbers", "`token_ids` are wrong")
        sampled["token_ids"] = list(tokens)
    if (reason := entry.get("finish_reason")) is not None:
        if reason not in FINISH_REASONS:
            raise RowError(f"`{where}.finish_reason` is {reason!r}: it is {' or '.join(FINISH_REASONS)}")
        sampled["finish_reason"] = reason
    return sampled
