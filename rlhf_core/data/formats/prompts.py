"""Prompts, with the columns that judges of answers read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.encoding import encode_prompt
from rlhf_core.chat.image_messages import compared_text
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.data.formats.base import Generated, Row, RowError, normalised, plain
from rlhf_core.data.formats.messages import PROMPT_COLUMNS, MessageFormat, prompt_column, read_prompt
from rlhf_core.data.nemo_gym import COLUMN as NEMO_GYM
from rlhf_core.data.nemo_gym import REQUEST, read_nemo_gym

_DESCRIPTIVE = {"id", "prompt", "task", "metadata"}


class Prompts(MessageFormat):
    name = "prompts"
    column = "prompt"
    named = frozenset({*PROMPT_COLUMNS, "system", "tools", "answer", "task", "metadata", "images", "image"})
    has_images = True
    tool_columns = ("tools",)  # any other is kept for what judges the answers

    def canonical(self, row: Row) -> Row:
        if NEMO_GYM in row:
            return read_nemo_gym(row)
        if REQUEST in row and prompt_column(row) is None:
            raise RowError(f"this is a row of NeMo Gym: say so by `columns: {{{NEMO_GYM}: {REQUEST}}}` of the dataset")
        return super().canonical(row)

    def without_tools(self, row: Row) -> Row:
        prompt = read_prompt(row)
        others = {name: value for name, value in row.items() if name not in (prompt_column(row), "system", "tools")}
        if "answer" in others:
            others["answer"] = plain(others["answer"], "answer")
        if "task" in others and not isinstance(others["task"], str):
            raise RowError(f"`task` must be text, this is {others['task']!r}", "`task` is not text")
        if "metadata" in others and not isinstance(others["metadata"], dict):
            raise RowError("`metadata` must be a mapping")
        return {"prompt": prompt, **others}

    def duplicate_key(self, row: Mapping[str, Any]) -> str:
        """Return the prompt, its tools, and the other columns that rewards and environments may read.

        `task` and `metadata` describe the origin of a row and are left out.
        """
        turns = [[m["role"], normalised(compared_text(m))] for m in row["prompt"]]
        calls = [message["tool_calls"] for message in row["prompt"] if "tool_calls" in message]
        others = {name: row[name] for name in sorted(row.keys() - _DESCRIPTIVE)}
        content = json.dumps([turns, calls, others], default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return len(encode_prompt(tokenizer, row["prompt"], row.get("tools")))

    def generated(self, item: Generated) -> Row:
        row = {"prompt": item.question, "task": item.task, "metadata": item.metadata}
        return row if item.answer is None else row | {"answer": item.answer}
