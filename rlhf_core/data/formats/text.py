"""Plain text, trained on every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.chat.encoding import encode_text
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.data.formats.base import Format, Generated, Row, filled


class Text(Format):
    name = "text"
    reads = frozenset({"text"})

    def canonical(self, row: Row) -> Row:
        return {"text": filled(row, "text")}

    def asked_text(self, row: Mapping[str, Any]) -> str:
        return str(row["text"])

    def asked_texts(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return ()

    def running_text(self, row: Mapping[str, Any]) -> str:
        return str(row["text"])

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return str(row["text"])

    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return len(encode_text(tokenizer, row["text"]))

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        return 2  # nothing predicts the first

    def generated(self, item: Generated) -> Row:
        return {"text": f"{item.question}\n{item.right_answer()}"}
