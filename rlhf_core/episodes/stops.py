"""Texts that end a reply."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from rlhf_core.chat.encoding import Tokenizer, decode_completion
from rlhf_core.types import Completion, Stretch


def until_stop(completion: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Truncate `completion` after the token that completes the first of the texts `stop`, if there is one.

    A token does not depend on later ones, so the result equals that of sampling with this stop.
    """

    count = tokens_until_stop(completion.token_ids, stop, tokenizer)
    if count is None:
        return completion
    return replace(
        completion, token_ids=completion.token_ids[:count], logprobs=completion.logprobs[:count], finish_reason="stop",
        stretches=_first(completion.stretches, count), top_logprobs=completion.top_logprobs[:count],
        kept=None if completion.kept is None else completion.kept.first(count),
    )  # fmt: skip


def tokens_until_stop(token_ids: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens up to the one that completes the first of the texts `stop`; None if there is none."""

    def has_stop(count: int) -> bool:
        text = decode_completion(tokenizer, token_ids[:count])
        return any(each in text for each in stop)

    length = len(token_ids)
    return bisect_left(range(length), True, key=has_stop) if stop and has_stop(length) else None


def _first(stretches: Sequence[Stretch], tokens: int) -> tuple[Stretch, ...]:
    """Return the stretches of the first `tokens`; empty if one version of the weights sampled these."""
    kept = []
    for stretch in stretches:
        if tokens > 0:
            kept.append(replace(stretch, tokens=min(stretch.tokens, tokens)))
        tokens -= stretch.tokens
    return tuple(kept) if len(kept) > 1 else ()
