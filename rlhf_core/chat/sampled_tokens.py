"""Tokens of sampled completions in rows, and whether they ended by themselves.

Text does not restore the tokens: a template may write a reply differently than the model did, and a special token that
the model sampled is ordinary text in a row. So rows made from samples keep the tokens, in the column `sampled`: for
each completion its `token_ids` and `finish_reason`, and `tokenizer`, the digest of its tokenizer. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rlhf_core.chat.rendering import Tokenizer

COLUMN = "sampled"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class SampledReply:
    token_ids: Sequence[int]  # up to the stop token, which is the last one if it ended; empty: they are not known
    was_cut: bool  # at the longest length
    tokenizer: str | None  # digest

    def read_by(self, tokenizer: Tokenizer) -> SampledReply:
        """Return the reply, without its tokens if they are not those of `tokenizer`; a difference is printed once."""
        digest = tokenizer_digest(tokenizer)
        if not self.token_ids or self.tokenizer == digest:
            return self
        _report_other_tokenizer(self.tokenizer, digest)
        return replace(self, token_ids=())


def sampled_reply(row: Mapping[str, Any], column: str) -> SampledReply | None:
    """Return the reply in a column of a row, of `messages` the last one; None if it was not sampled here."""
    sampled = row.get(COLUMN)
    return None if sampled is None or column not in sampled else reply_of(sampled[column], sampled.get("tokenizer"))


def reply_of(entry: Mapping[str, Any], tokenizer: str | None) -> SampledReply | None:
    """Return a completion of a row of the format `completions`; None if only its text is known."""
    if "finish_reason" not in entry and "token_ids" not in entry:
        return None
    return SampledReply(entry.get("token_ids", ()), entry.get("finish_reason") == "length", tokenizer)


def sampled_column(row: Mapping[str, Any], replies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the column `sampled` of a row made from `row`, of the format `completions`; empty without tokens.

    replies: its completion in each column of the new row.
    """
    kept = {
        column: {name: entry[name] for name in ("token_ids", "finish_reason") if name in entry}
        for column, entry in replies.items()
    }
    if not any(kept.values()):
        return {}
    return {COLUMN: kept | ({"tokenizer": row["tokenizer"]} if "tokenizer" in row else {})}


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of the vocabulary and the chat template: if both are equal, tokens mean the same and turns end
    alike.
    """
    return _digest(tokenizer, json.dumps(tokenizer.chat_template, sort_keys=True))


@lru_cache(maxsize=32)
def _digest(tokenizer: Tokenizer, template: str) -> str:
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id, template]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:_DIGITS]


@lru_cache(maxsize=32)
def _report_other_tokenizer(sampled_by: str | None, digest: str) -> None:
    print(
        f"the tokens of sampled completions are not used: they were sampled with another tokenizer or chat template "
        f"({sampled_by or 'unknown'}, here {digest}), so their text is written by the template of this model",
        flush=True,
    )
