"""Mismatch between the token probabilities of engine and trainer: metrics and importance-sampling correction."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from rlhf_core.metrics import Max, Metric, TokenMean
from rlhf_core.types import sequence_ids

Correction = Literal["truncate", "mask", "token_filter", "sequence_filter"]
RatioOf = Literal["token", "sequence", "geometric_mean"]

# Bounds exponents only: exp(20) does not overflow float32 and is outside any reasonable bound.
_LARGEST_EXPONENT = 20.0


@torch.no_grad()
def measure(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Measure the difference between the trainer's and the engine's log-probs at the sampled tokens.

    old_logprobs, rollout_logprobs: (N,) float32; mask: (N,) bool, true where the policy sampled.
    Returns rollout_mismatch and rollout_mismatch_max, mean and largest |difference| in nats; rollout_kl, the mean of
    KL(engine || trainer) by the estimator w - 1 - log w, w = trainer's / engine's probability (k3 of losses/kl.py).
    """
    difference = old_logprobs[mask] - rollout_logprobs[mask]
    bounded = difference.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return {
        "rollout_mismatch": TokenMean(difference.abs().sum()),
        "rollout_mismatch_max": Max(difference.abs().max() if difference.numel() else difference.sum()),
        "rollout_kl": TokenMean((bounded.expm1() - bounded).sum()),
    }


@torch.no_grad()
def corrected(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    sequence_lengths: Tensor,
    *,
    correction: Correction,
    ratio_of: RatioOf = "token",
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Correct mask and weights by w, the trainer's / the engine's probability of a token, of its sequence (the product
    over trained tokens), or the geometric mean over these tokens:

    truncate: all tokens, weighted by w clamped to [low, high]; by token with low 0 the truncated importance sampling of
    F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025; OpenRLHF also bounds
    w from below.
    mask: tokens with low <= w <= high, weighted by w; by token IcePop of arXiv:2510.18855. token_filter is its other
    name.
    sequence_filter: tokens of sequences whose geometric mean is in [low, high], weighted by min(w, high) of the token.
    old_logprobs, rollout_logprobs: (N,) float32; mask: (N,) bool; loss_weights: (N,) float32, before correction;
    sequence_lengths: (S,) int64. Sequences must be complete.
    Returns the corrected mask and loss_weights. A dropped token is removed from the mask, so its weight, which may be
    infinite, is never multiplied by 0. The weights of the others do not depend on how many tokens are dropped.
    """
    difference = old_logprobs - rollout_logprobs
    weights = _ratios(difference, mask, sequence_lengths, ratio_of)
    match correction:
        case "truncate":
            kept, weights = mask, weights.clamp(low, high)
        case "mask" | "token_filter":
            kept = mask & (weights >= low) & (weights <= high)
        case "sequence_filter":
            means = _ratios(difference, mask, sequence_lengths, "geometric_mean")
            kept = mask & (means >= low) & (means <= high)
            weights = weights.clamp(max=high)
        case _:
            assert_never(correction)
    return kept, torch.where(kept, loss_weights * weights, torch.zeros_like(loss_weights))


def _ratios(difference: Tensor, mask: Tensor, sequence_lengths: Tensor, ratio_of: RatioOf) -> Tensor:
    """Return exp of `difference`, (N,), or of its sum or mean over the trained tokens of the token's sequence: 1 for a
    sequence without any.
    """
    if ratio_of != "token":
        ids = sequence_ids(sequence_lengths, mask.numel())
        zeros = torch.zeros_like(sequence_lengths, dtype=difference.dtype)
        of_sequences = zeros.index_add(0, ids[mask], difference[mask])
        if ratio_of == "geometric_mean":
            counts = zeros.index_add(0, ids[mask], torch.ones_like(difference[mask]))
            of_sequences = of_sequences / counts.clamp(min=1)
        difference = of_sequences[ids]
    return difference.clamp(max=_LARGEST_EXPONENT).exp()
