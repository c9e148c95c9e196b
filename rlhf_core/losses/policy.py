"""Losses of the policy: tensors and numbers in, a loss and sums for the metrics out."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is far beyond any clip range and far below overflow in float32.
_LARGEST_LOG_RATIO = 20.0


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, eq. 7 of arXiv:1707.06347; its two sides apart as in eq. 10 of arXiv:2503.14476.

    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool, true where the policy sampled.
    The ratio is held inside [1 - clip_low, 1 + clip_high].
    num_tokens: trained tokens of the whole optimizer step over all ranks, so that the gradient does not depend
    on packing or sharding.
    Returns the loss () and sums over the trained tokens, to be divided by their number:
    clipped_tokens: those whose ratio the clip stopped, so that they have no gradient;
    approx_kl_sum: KL(old || now) by the estimator r - 1 - log r, r = now / old, of tokens that old sampled.
    """
    log_ratio = logprobs[mask] - old_logprobs[mask]
    advantages = advantages[mask]
    bounded = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = bounded.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(plain, clipped).sum() / num_tokens
    with torch.no_grad():
        metrics = {
            "clipped_tokens": (clipped < plain).sum().float(),
            "approx_kl_sum": (bounded.expm1() - bounded).sum(),
        }
    return loss, metrics
