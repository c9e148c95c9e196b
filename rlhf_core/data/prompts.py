"""Canonical rows of format `prompts` encoded as prompts of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.chat.encoding import Tokenizer, encode_prompt
from rlhf_core.chat.hints import Hint, append_to_prompt
from rlhf_core.chat.image_messages import images_of
from rlhf_core.data.fitting import Fitted, Fitting, RowPolicy, fit
from rlhf_core.errors import StageError
from rlhf_core.models.vision import RowImages
from rlhf_core.types import Prompt, SequenceImage


def to_prompts(rows: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, *, max_tokens: int) -> list[Prompt]:
    """Return the prompts as `fit_prompts` does; an unusable prompt is an error."""
    return fit_prompts(rows, tokenizer, max_tokens=max_tokens, policy=RowPolicy()).rows


def fit_prompts(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    policy: RowPolicy,
    hint: Hint | None = None,
    images: RowImages | None = None,
) -> Fitted[list[Prompt]]:
    """Encode each row's messages with the chat template, ready for a completion.

    hint: appended to the last message of the user for a teacher; it must fit too. images: reader of the rows' images;
    none: they have none.
    Raises StageError for a prompt of more than `max_tokens` tokens, or that the template cannot render, if their policy
    is `error`, and for the policy `truncate`: a truncated prompt is another question.
    """
    if policy.long == "truncate":
        raise StageError("on_long_row: a prompt that is cut asks another question; use error or drop")

    def problem(prompt: Prompt) -> str | None:
        longest = max(len(prompt.token_ids), len(prompt.hinted_ids))
        if longest <= max_tokens:
            return None
        return (
            f"prompt {prompt.id} ({prompt.text[:40]!r}) has {longest} tokens{' with its hint' if hint else ''}, more "
            f"than the {max_tokens} "
            "that `rollout.max_length` leaves beside `sampling.max_tokens`: raise it, or set the dataset's on_long_row "
            "to drop"
        )

    def encode(row: Mapping[str, Any]) -> list[Prompt]:
        messages, tools = row["prompt"], row.get("tools")
        ids = encode_prompt(tokenizer, messages, tools)
        placed: tuple[SequenceImage, ...] = ()
        if images is not None:
            ids, _, placed = images.expanded(ids, [False] * len(ids), images_of(messages))
        hinted = encode_prompt(tokenizer, append_to_prompt(messages, hint(row)), tools) if hint is not None else []
        return [Prompt(row["id"], messages[-1]["content"], tuple(ids), row, tuple(hinted), placed)]

    return fit(rows, Fitting(encode, problem, lambda prompt: None, policy), keep=list)
