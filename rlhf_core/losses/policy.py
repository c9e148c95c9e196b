"""Policy losses: functions of tensors and numbers that return a loss and metrics.

`loss_weights` (N,) float32 is the weight of each token in the loss of the whole optimizer step (losses/aggregation.py),
so that the gradient does not depend on packing, micro-batching or sharding. All return the loss () and two metrics,
means over the trained tokens:
clip_fraction: share of tokens whose gradient or ratio was clipped;
approx_kl: KL(old || now) by the estimator r - 1 - log r, r = now / old, at tokens sampled by the old policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.metrics import LossAndMetrics, TokenMean
from rlhf_core.types import sequence_ids

# exp(20) is far beyond any clip range and far below overflow in float32.
_LARGEST_LOG_RATIO = 20.0


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossAndMetrics:
    """PPO's clipped surrogate, eq. 7 of arXiv:1707.06347, with separate bounds as in eq. 10 of arXiv:2503.14476.

    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool, true where the policy sampled.
    The ratio is clipped to [1 - clip_low, 1 + clip_high]; dual_clip: see `_clipped_terms`.
    clip_fraction: share of tokens without gradient.
    """
    log_ratio = logprobs[mask] - old_logprobs[mask]
    terms, stopped = _clipped_terms(log_ratio, advantages[mask], clip_low, clip_high, dual_clip)
    return (terms * loss_weights[mask]).sum(), _metrics(log_ratio, stopped)


def sequence_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    sequence_lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossAndMetrics:
    """GSPO: the clipped surrogate with one ratio per sequence, eq. 5-7 of arXiv:2507.18071.

    Every token of a sequence has the ratio s = exp(mean_t(logprob_t - old_logprob_t)), the mean over its trained
    tokens. The gradient of s is s times the mean of the gradients of their log-probs, with any aggregation. With the
    aggregation `sequence` this is the paper's mean over sequences.
    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool; sequence_lengths: (S,) int64. Sequences must be
    complete. clip_fraction: share of tokens whose sequence has no gradient.
    """
    log_ratio = logprobs[mask] - old_logprobs[mask]
    means = _means_of_sequences(log_ratio, mask, sequence_lengths)
    terms, stopped = _clipped_terms(means, advantages[mask], clip_low, clip_high, dual_clip)
    return (terms * loss_weights[mask]).sum(), _metrics(log_ratio, stopped)


def geometric_mean_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    sequence_lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """GMPO, arXiv:2507.20673: the geometric mean of a sequence's ratios, each clipped first, times the advantage.

    The log-ratio of a token is at most clip_high where its advantage is not negative, and else at least -clip_low, so
    that a clipped token has no gradient and the others of its sequence keep theirs. With the aggregation `sequence`
    this is the paper's mean over sequences.
    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool; sequence_lengths: (S,) int64. Sequences must be
    complete. clip_fraction: share of tokens without gradient.
    """
    log_ratio, of_tokens = logprobs[mask] - old_logprobs[mask], advantages[mask]
    clipped = torch.where(of_tokens < 0, log_ratio.clamp(min=-clip_low), log_ratio.clamp(max=clip_high))
    ratios = _bounded(_means_of_sequences(clipped, mask, sequence_lengths)).exp()
    return -(ratios * of_tokens * loss_weights[mask]).sum(), _metrics(log_ratio, clipped != log_ratio)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """CISPO, eq. 4-5 of arXiv:2506.13585: log-prob x advantage x ratio. The ratio is clipped to [1 - clip_low, 1 +
    clip_high] and detached, so that every token keeps the gradient of its log-prob.

    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool, true where the policy sampled.
    clip_fraction: share of tokens whose ratio was clipped.
    """
    logprobs, log_ratio = logprobs[mask], logprobs[mask] - old_logprobs[mask]
    ratio = _bounded(log_ratio.detach()).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(clipped * advantages[mask] * logprobs * loss_weights[mask]).sum()
    return loss, _metrics(log_ratio, clipped != ratio)


def soft_gated_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> LossAndMetrics:
    """SAPO, arXiv:2511.20347: (4 / t) sigmoid(t (r - 1)) x advantage, with r the ratio and t the temperature of the
    advantage's sign. Its gradient is that of the ratio times 1 / cosh²(t (r - 1) / 2), which is 1 at the old policy.

    logprobs, old_logprobs, advantages: (N,) float32; mask: (N,) bool, true where the policy sampled.
    clip_fraction: share of tokens with less than half of their gradient.
    """
    log_ratio, of_tokens = logprobs[mask] - old_logprobs[mask], advantages[mask]
    temperatures = torch.full_like(of_tokens, temperature_negative).masked_fill(of_tokens > 0, temperature_positive)
    gates = (temperatures * (_bounded(log_ratio).exp() - 1)).sigmoid()
    terms = -4 / temperatures * gates * of_tokens
    return (terms * loss_weights[mask]).sum(), _metrics(log_ratio, 4 * gates * (1 - gates) < 0.5)


def divergence_masked_policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float,
) -> LossAndMetrics:
    """DPPO with the binary total variation, arXiv:2602.04879: ratio x advantage. A token is masked where its advantage
    is positive and its probability more than clip_high above the engine's, or negative and more than clip_low below.

    For the sampled token alone, the difference of its probabilities is the total variation of the two distributions
    over it and all others. The ratio, now / by the engine, is at most max_ratio, also where it weighs the gradient.
    logprobs, rollout_logprobs, advantages: (N,) float32; mask: (N,) bool, true where the policy sampled.
    clip_fraction: share of masked tokens; approx_kl: from the engine's distribution.
    """
    logprobs, of_tokens = logprobs[mask], advantages[mask]
    log_ratio = logprobs - rollout_logprobs[mask]
    moved = (logprobs.exp() - rollout_logprobs[mask].exp()).detach()
    masked = ((of_tokens > 0) & (moved > clip_high)) | ((of_tokens < 0) & (moved < -clip_low))
    ratio = _bounded(log_ratio.detach()).exp().clamp(max=max_ratio) * (logprobs - logprobs.detach()).exp()
    terms = torch.where(masked, torch.zeros_like(ratio), -ratio * of_tokens)
    return (terms * loss_weights[mask]).sum(), _metrics(log_ratio, masked)


def _means_of_sequences(values: Tensor, mask: Tensor, sequence_lengths: Tensor) -> Tensor:
    """Return at each trained token the mean of `values`, (M,) of the trained tokens, over its sequence, (M,)."""
    ids = sequence_ids(sequence_lengths, mask.numel())[mask]
    zeros = values.new_zeros(sequence_lengths.numel())
    counts = zeros.index_add(0, ids, torch.ones_like(values))
    return (zeros.index_add(0, ids, values) / counts.clamp(min=1))[ids]


def _clipped_terms(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss term of each token, and whether clipping removed its gradient.

    dual_clip: the term of a negative advantage is at most this many times -advantage, eq. 5 of arXiv:1912.09729.
    """
    ratio = _bounded(log_ratio).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.minimum(plain, clipped)
    stopped = clipped < plain
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        stopped = stopped | (objective < floor)
        objective = torch.maximum(objective, floor)
    return -objective, stopped


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


@torch.no_grad()
def _metrics(log_ratio: Tensor, stopped: Tensor) -> dict[str, TokenMean]:
    bounded = _bounded(log_ratio)
    return {
        "clip_fraction": TokenMean(stopped.sum()),
        "approx_kl": TokenMean((bounded.expm1() - bounded).sum()),
    }
