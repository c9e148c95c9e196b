"""Rows of one prompt and its completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.chat.encoding import ended_completion
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.chat.sampled_tokens import SampledReply
from rlhf_core.data.formats.base import MissingColumnError, Row, RowError, first_trained
from rlhf_core.data.formats.messages import (
    MESSAGE_COLUMNS,
    Message,
    MessageFormat,
    prompt_column,
    read_completion,
    read_prompt,
)


class AnsweredFormat(MessageFormat):
    """A format whose rows have a prompt, and one or several completions. A sequence is the prompt and one of them."""

    column = "prompt"

    @abstractmethod
    def completions(self, row: Mapping[str, Any]) -> list[str]:
        """Return the completions of the prompt."""

    def sampled(self, row: Mapping[str, Any]) -> list[SampledReply | None]:
        """Return the sampled tokens of each of `completions`, if known."""
        return [None] * len(self.completions(row))

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join([super().whole_text(row), *self.completions(row)])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return max(len(ids) for ids, _ in self.encoded(tokenizer, row))

    def all_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return sum(len(ids) for ids, _ in self.encoded(tokenizer, row))

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return min(first_trained(mask) for _, mask in self.encoded(tokenizer, row)) + 1

    def encoded(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
        """Return token ids and mask of each completion with its prompt."""
        replies = zip(self.completions(row), self.sampled(row), strict=True)
        return [
            ended_completion(tokenizer, row["prompt"], text, row.get("tools"), sampled=sampled)
            for text, sampled in replies
        ]


def read_answered(row: Row, columns: Sequence[str]) -> tuple[list[Message], list[str]]:
    """Return the prompt, and the completion in each of `columns`, which contain text, or a conversation that ends with
    it.

    Raises RowError if a column is missing, or answers another prompt.
    """
    missing = next((column for column in columns if row.get(column) is None), None)
    if missing is not None:
        raise MissingColumnError(missing, row)
    befores, texts = zip(*(read_completion(row[column], column) for column in columns), strict=True)
    named, before = " and ".join(f"`{column}`" for column in columns), befores[0]
    if any(other != before for other in befores):
        raise RowError(f"{named} do not answer the same prompt")
    stated = prompt_column(row) not in (None, *MESSAGE_COLUMNS)
    prompt = read_prompt(row) if stated or not before else before
    if before and prompt != before:
        raise RowError(f"`prompt` differs from the prompt in {named}")
    return prompt, list(texts)
