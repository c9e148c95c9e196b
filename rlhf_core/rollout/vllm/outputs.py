"""Conversion of vLLM's outputs to completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rlhf_core.errors import StageError, WeightSyncError
from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.rollout.engine import Unfinished
from rlhf_core.types import Completion, FinishReason, Stretch

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class KeptIn:
    """Reads the tokens that truncated sampling kept from the log-probs at each position."""

    returned: int  # likeliest tokens at a position at least, beside the sampled one
    vocabulary: int

    def tokens(self, positions: Any) -> KeptTokens:
        """Return those with a probability. positions: vLLM's FlatLogprobs, in which the sampled token comes first.

        Raises StageError if there may be others than those returned.
        """
        kept = []
        for start, end in zip(positions.start_indices, positions.end_indices, strict=True):
            likeliest = positions.token_ids[start + 1 : end]
            count = sum(logprob > -math.inf for logprob in positions.logprobs[start + 1 : end])
            if self.returned <= count < self.vocabulary:
                raise StageError(
                    f"sampling kept more than {count} tokens at a position, since so many are as likely as the last of "
                    "`top_k`: the log-probs of this model say too little; remove top_k, top_p and min_p"
                )
            kept.append(likeliest[:count])
        return KeptTokens.of(kept)


@dataclass
class Partial:
    """The tokens of a completion sampled so far, possibly by several versions of the weights."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    top: int = 0  # likeliest tokens at each place to keep
    kept_in: KeptIn | None = None  # reads the tokens that truncated sampling kept
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)  # of the tokens, in parts
    finish_reason: str | None = None  # vLLM's, once finished

    def add(self, output: Any, version: int) -> Self:
        """Add new tokens. output: vLLM's CompletionOutput with these only. version: of the weights."""
        tokens = output.token_ids
        self.token_ids += tokens
        if self.kept_in is None:
            self.logprobs += chosen(tokens, output.logprobs)
        else:
            self.logprobs += [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
            self.kept.append(self.kept_in.tokens(output.logprobs))
        if self.top:
            self.top_logprobs += [_likeliest(position, self.top) for position in output.logprobs]
        self.finish_reason = output.finish_reason
        if tokens and self.stretches and self.stretches[-1].weight_version == version:
            self.stretches[-1] = Stretch(self.stretches[-1].tokens + len(tokens), version)
        elif tokens:
            self.stretches.append(Stretch(len(tokens), version))
        return self

    def completion(self) -> Completion:
        """Return the completion.

        Raises RuntimeError if it did not end by a stop token or its length, WeightSyncError if a log-prob is not
        finite.
        """
        reason = _REASONS.get(self.finish_reason or "")
        if reason is None:
            raise RuntimeError(f"vLLM ended a completion after {len(self.token_ids)} tokens: {self.finish_reason}")
        oldest = self.stretches[0].weight_version
        if not all(map(math.isfinite, self.logprobs)):
            raise WeightSyncError(
                f"the engine serves weights of version {oldest} that give log-probs which are not finite"
            )
        stretches = tuple(self.stretches) if len(self.stretches) > 1 else ()
        kept = KeptTokens.joined(self.kept) if self.kept else None
        return Completion(self.token_ids, self.logprobs, reason, oldest, stretches, tuple(self.top_logprobs), kept)

    def unfinished(self) -> Unfinished:
        return Unfinished(tuple(self.token_ids), tuple(self.logprobs), tuple(self.top_logprobs))


def _likeliest(position: Mapping[int, Any], count: int) -> dict[int, float]:
    """Return the log-probs of the `count` likeliest tokens that can be sampled.

    position: vLLM's, which has the sampled token in any case.
    """
    by_rank = sorted(position.items(), key=lambda each: int(each[1].rank))
    return {token: float(each.logprob) for token, each in by_rank[:count] if each.logprob > -math.inf}


def chosen(tokens: Sequence[int], positions: Sequence[Mapping[int, Any]]) -> list[float]:
    """Return the log-prob of each token. positions: vLLM's log-probs by token, at each position."""
    return [position[token].logprob for token, position in zip(tokens, positions, strict=True)]
