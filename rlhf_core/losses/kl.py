"""KL(policy || reference) from the log-probs of tokens that the policy sampled (J. Schulman, "Approximating KL
divergence", 2020): k1 is unbiased and noisy, k2 biased and calm, k3 unbiased, never negative."""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

# Only where it is an exponent: exp(20) neither overflows float32 nor occurs in a run that is still alive.
_LARGEST_EXPONENT = 20.0


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """The estimate at each token, in nats; with d = logprobs - ref_logprobs:

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


def loss_term(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, loss_weights: Tensor, kind: KLEstimator) -> Tensor:
    """The mean KL as a term to minimise: its value is the weighted sum of the estimator; its gradient is not always the
    estimator's own, since a good estimate of KL need not have a gradient that descends it. For tokens x sampled by the
    policy p, with reference q and d = log p(x) - log q(x), the expectation of

    k1's gradient, grad log p, is zero: as a loss it would do nothing but add noise. Here k1 takes k2's gradient;
    k2's gradient, d grad log p, is the gradient of KL(p || q), the divergence that is meant;
    k3's gradient, (1 - q/p) grad log p, is the gradient of KL(q || p), the other direction. That is the term of the
    GRPO paper (eq. 4 of arXiv:2402.03300) and GRPO's default here. The two agree where p is near q.

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
