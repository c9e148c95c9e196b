"""KL(policy || reference) from the log-probs of tokens that the policy sampled (J. Schulman, "Approximating KL
divergence", 2020): k1 is unbiased with high variance, k2 biased with low variance, k3 unbiased and never negative."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from rlhf_core.metrics import Metric, TokenMean

KLEstimator = Literal["k1", "k2", "k3"]

# Bounds exponents only: exp(20) does not overflow float32, and no healthy run reaches it.
_LARGEST_EXPONENT = 20.0


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Estimate the KL at each token, in nats. With d = logprobs - ref_logprobs:

    k1: d;  k2: d^2 / 2;  k3: exp(-d) - 1 + d.
    logprobs, ref_logprobs: (N,) float32, of the sampled tokens. Returns (N,) float32.
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            bounded = difference.clamp(min=-_LARGEST_EXPONENT)
            return (-bounded).expm1() + bounded
        case _:
            assert_never(kind)


@torch.no_grad()
def measure(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return `kl`: KL(policy || reference) in nats per token, the mean of log p - log q over the sampled tokens.

    logprobs, ref_logprobs: (N,) float32, both the trainer's: an engine's log-probs would add their mismatch, so that
    the KL of a policy to itself would not be 0. mask: (N,) bool, true where the policy sampled.
    """
    return {"kl": TokenMean((logprobs - ref_logprobs)[mask].double().sum())}


def loss_term(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, loss_weights: Tensor, kind: KLEstimator) -> Tensor:
    """Return the mean KL as a loss term: the weighted sum of the estimator.

    Its gradient is not always that of the estimator, because a good estimate of KL need not have a gradient that
    reduces it. For tokens x sampled by the policy p, with reference q and d = log p(x) - log q(x), the expectation of

    k1's gradient, grad log p, is zero: as a loss it would only add noise. k1 therefore uses k2's gradient;
    k2's gradient, d grad log p, is the gradient of KL(p || q), the divergence to minimise;
    k3's gradient, (1 - q/p) grad log p, is the gradient of KL(q || p), the reverse direction. That is the term of the
    GRPO paper (eq. 4 of arXiv:2402.03300) and GRPO's default here. Both agree if p is close to q.

    logprobs, ref_logprobs: (N,) float32; mask: (N,) bool, true where the policy sampled.
    loss_weights: (N,) float32, of each token in the loss of the whole optimizer step.
    Returns a scalar ().
    """
    logprobs, ref_logprobs = logprobs[mask], ref_logprobs[mask]
    term = estimate(logprobs, ref_logprobs, kind)
    if kind == "k1":
        squared = estimate(logprobs, ref_logprobs, "k2")
        term = term.detach() + squared - squared.detach()
    return (term * loss_weights[mask]).sum()
