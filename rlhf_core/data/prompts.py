"""Canonical rows of format `prompts` become prompts as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.data.chat import Tokenizer, encode_prompt
from rlhf_core.errors import StageError
from rlhf_core.types import Prompt


def to_prompts(rows: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, *, max_tokens: int) -> list[Prompt]:
    """Each row's messages through the chat template, ready for a completion.

    Raises StageError for a prompt of more than `max_tokens` tokens: cutting it would ask another question.
    """
    prompts = []
    for row in rows:
        token_ids = tuple(encode_prompt(tokenizer, row["prompt"], row.get("tools")))
        text = row["prompt"][-1]["content"]
        if len(token_ids) > max_tokens:
            raise StageError(
                f"prompt {row['id']} ({text[:40]!r}) has {len(token_ids)} tokens, more than the {max_tokens} that "
                "`rollout.max_length` leaves beside `sampling.max_tokens`: raise it, or leave out longer prompts"
            )
        prompts.append(Prompt(id=row["id"], text=text, token_ids=token_ids, row=row))
    return prompts
