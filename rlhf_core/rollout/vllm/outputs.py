"""What vLLM returns of a request, as a completion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rlhf_core.errors import WeightSyncError
from rlhf_core.types import Completion, FinishReason, Stretch

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass
class Partial:
    """A completion as far as it was sampled; its weights may have been exchanged in between."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    finish_reason: str | None = None  # vLLM's, once it is whole

    def add(self, output: Any, version: int) -> Self:
        """output: vLLM's CompletionOutput, with the tokens since the last one; version: of the weights they are by."""
        tokens = output.token_ids
        self.token_ids += tokens
        self.logprobs += chosen(tokens, output.logprobs)
        self.finish_reason = output.finish_reason
        if tokens and self.stretches and self.stretches[-1].weight_version == version:
            self.stretches[-1] = Stretch(self.stretches[-1].tokens + len(tokens), version)
        elif tokens:
            self.stretches.append(Stretch(len(tokens), version))
        return self

    def completion(self) -> Completion:
        """Raises RuntimeError where vLLM has ended it for another reason, WeightSyncError for wrong log-probs."""
        reason = _REASONS.get(self.finish_reason or "")
        if reason is None:
            raise RuntimeError(f"vLLM ended a completion after {len(self.token_ids)} tokens: {self.finish_reason}")
        oldest = self.stretches[0].weight_version
        if not all(map(math.isfinite, self.logprobs)):
            raise WeightSyncError(
                f"the engine serves weights of version {oldest} that give log-probs which are not finite"
            )
        several = tuple(self.stretches) if len(self.stretches) > 1 else ()
        return Completion(tuple(self.token_ids), tuple(self.logprobs), reason, oldest, several)


def chosen(tokens: Sequence[int], positions: Sequence[Mapping[int, Any]]) -> list[float]:
    """At each position vLLM gives log-probs by token; this takes that of the token which is there."""
    return [position[token].logprob for token, position in zip(tokens, positions, strict=True)]
