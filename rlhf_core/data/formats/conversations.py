"""Conversations, of which the assistant turns are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.chat import encode_conversation
from rlhf_core.data.formats.base import Generated, Row, RowError, filled, missing_column
from rlhf_core.data.formats.messages import MessageFormat, prompt_column, read_messages, read_prompt
from rlhf_core.data.rendering import Tokenizer


class Conversations(MessageFormat):
    name = "conversations"
    column = "messages"

    def without_tools(self, row: Row) -> Row:
        if "messages" in row:
            messages = read_messages(row["messages"], "messages")
        elif prompt_column(row) is not None:
            completion = "completion" if "completion" in row or "answer" not in row else "answer"
            messages = [*read_prompt(row), {"role": "assistant", "content": filled(row, completion)}]
        else:
            raise missing_column("messages", row)
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError("`messages` has no assistant turn, so there is nothing to train on")
        return {"messages": messages}

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return max(len(ids) for ids, _ in encode_conversation(tokenizer, row["messages"], row.get("tools")))

    def generated(self, item: Generated) -> Row:
        return {"prompt": item.question, "completion": item.right_answer()}
