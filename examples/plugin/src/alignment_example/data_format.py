"""A data format: riddles, each with its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.encoding import encode_prompt
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.config.data.format_table import FormatEntry
from rlhf_core.data.formats.base import Format, Row, filled


class Riddles(Format):
    name = "riddles"

    def canonical(self, row: Row) -> Row:
        return {"riddle": filled(row, "riddle"), "answer": filled(row, "answer")}

    def asked_text(self, row: Mapping[str, Any]) -> str:
        return str(row["riddle"])

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return f"{row['riddle']}\n{row['answer']}"

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return len(encode_prompt(tokenizer, [{"role": "user", "content": row["riddle"]}]))


RIDDLES = FormatEntry(
    "alignment_example.data_format:Riddles", truncation_problem="a riddle that is cut has another answer"
)
