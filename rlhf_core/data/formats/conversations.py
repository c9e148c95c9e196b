"""Conversations; their assistant turns are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.encoding import Encoded, encode_conversation, num_tokens_of_all
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.chat.sampled_tokens import sampled_reply
from rlhf_core.data.formats.base import Format, Generated, MissingColumnError, Row, RowError, filled, first_trained
from rlhf_core.data.formats.messages import (
    BESIDE_MESSAGES,
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    Message,
    MessageFormat,
    prompt_column,
    read_messages,
    read_prompt,
)

_MEASURED_TURN_BY_TURN = 200  # messages


class Conversations(MessageFormat):
    name = "conversations"
    column = "messages"
    has_images = True
    reads = frozenset({*PROMPT_COLUMNS, "completion", "answer", "images", "image", *BESIDE_MESSAGES})

    def without_tools(self, row: Row) -> Row:
        column = next((name for name in MESSAGE_COLUMNS if name in row), None)
        if column is not None:
            messages = read_messages(row[column], column)
            if (
                "prompt" in row
                and "completion" in row
                and [*read_prompt(row), *_completion(row, "completion")] != messages
            ):
                raise RowError(
                    f"`{column}` and `prompt` with `completion` are two conversations: remove one, such as by "
                    f"`columns: {{unused: {column}}}`"
                )
            for other in MESSAGE_COLUMNS:
                if other in row and read_messages(row[other], other) != messages:
                    raise RowError(
                        f"`{column}` and `{other}` are two conversations: remove one, such as by "
                        f"`columns: {{unused: {other}}}`"
                    )
        elif prompt_column(row) is not None:
            column = "completion" if "completion" in row or "answer" not in row else "answer"
            messages = [*read_prompt(row), *_completion(row, column)]
        else:
            raise MissingColumnError("messages", row, ", and no `prompt` with `completion`")
        if not any(message["role"] == "assistant" for message in messages[1:]):
            first = "" if messages[0]["role"] != "assistant" else " but the first message, which answers nothing"
            raise RowError(f"`{column}` has no assistant turn{first}, so there is nothing to train on")
        return {"messages": messages}

    def unread(self, columns: frozenset[str]) -> frozenset[str]:
        whole = next((name for name in MESSAGE_COLUMNS if name in columns), None)
        if whole is not None:  # equal questions are compared
            compared = {"prompt", "completion"} if {"prompt", "completion"} <= columns else set()
            others = {*PROMPT_COLUMNS, "completion", "answer"} - {*MESSAGE_COLUMNS, *compared}
            return Format.unread(self, columns) | (columns & others)
        return super().unread(columns) | (columns & {"answer"} if "completion" in columns else frozenset())

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        messages, tools = row["messages"], row.get("tools")
        if len(messages) > _MEASURED_TURN_BY_TURN:  # each turn is rendered with all earlier ones
            return num_tokens_of_all(tokenizer, messages, tools)
        return max(len(ids) for ids, _ in _encoded(tokenizer, row))

    def all_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        if len(row["messages"]) > _MEASURED_TURN_BY_TURN:
            return self.num_tokens(tokenizer, row)
        return sum(len(ids) for ids, _ in _encoded(tokenizer, row))

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return min(first_trained(mask) for _, mask in _encoded(tokenizer, row)) + 1

    def generated(self, item: Generated) -> Row:
        return {"prompt": item.question, "completion": item.right_answer()}


def _encoded(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[Encoded]:
    sampled = sampled_reply(row, "messages")
    return encode_conversation(tokenizer, row["messages"], row.get("tools"), sampled=sampled)


def _completion(row: Row, column: str) -> list[Message]:
    if isinstance(row.get(column), list | tuple):
        return read_messages(row[column], column)
    if column not in row:
        raise MissingColumnError(column, row.keys() - {prompt_column(row)} or row)
    return [{"role": "assistant", "content": filled(row, column)}]
