"""Losses of learning from given text."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.losses.masking import masked_sum


def next_token_loss(logprobs: Tensor, mask: Tensor, *, num_tokens: int | Tensor) -> Tensor:
    """Cross-entropy of the trained tokens, in nats a token.

    logprobs: (N,) float32, of the token at t given those before it; mask: (N,) bool, true where the token is trained.
    num_tokens: trained tokens of the whole optimizer step over all ranks, so that the gradient does not depend
    on packing or sharding.
    Returns a scalar ().
    """
    return -masked_sum(logprobs, mask) / num_tokens
