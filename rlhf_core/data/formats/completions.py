"""Completions: several answers to one prompt, each with the reward that it got, if any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.chat import encode_completion
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, first_trained, number
from rlhf_core.data.formats.messages import BESIDE_MESSAGES, PROMPT_COLUMNS, MessageFormat, read_prompt
from rlhf_core.data.rendering import Tokenizer

_NUMBERS = ("reward", "logprob")


class Completions(MessageFormat):
    name = "completions"
    column = "prompt"
    reads = frozenset({*PROMPT_COLUMNS, "completions", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        if row.get("completions") is None:
            raise MissingColumnError("completions", row)
        given = row["completions"]
        if not isinstance(given, list | tuple) or not given:
            raise RowError("`completions` must be a list with at least one completion")
        completions = [_completion(each, f"completions[{index}]") for index, each in enumerate(given)]
        return {"prompt": read_prompt(row), "completions": completions}

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join([super().whole_text(row), *(each["text"] for each in row["completions"])])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return max(len(ids) for ids, _ in _encoded(tokenizer, row))

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return min(first_trained(mask) for _, mask in _encoded(tokenizer, row)) + 1


def _encoded(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
    tools = row.get("tools")
    return [encode_completion(tokenizer, row["prompt"], each["text"], tools) for each in row["completions"]]


def _completion(value: Any, where: str) -> dict[str, Any]:
    """Text, or {text, reward, rewards, logprob}, of which all but the text may be left out."""
    given = {"text": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise RowError(f"`{where}` must be text, or a mapping with `text`", "`completions` has one without text")
    found: dict[str, Any] = {"text": given["text"]}
    for name in _NUMBERS:
        if given.get(name) is not None:
            found[name] = number(given[name], f"{where}.{name}")
    rewards = given.get("rewards")
    if rewards is not None:
        if not isinstance(rewards, Mapping):
            raise RowError(f"`{where}.rewards` must be a mapping from names to numbers")
        found["rewards"] = {str(name): number(value, f"{where}.rewards.{name}") for name, value in rewards.items()}
    return found
