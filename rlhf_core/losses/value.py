"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.metrics import LossAndMetrics, TokenMean


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, loss_weights: Tensor, *, clip: float | None
) -> LossAndMetrics:
    """Half the larger of the squared error and the clipped squared error: the value loss used with PPO
    (arXiv:2005.12729, section 3, item 1).

    values, old_values, returns: (N,) float32; mask: (N,) bool, true where the policy sampled.
    clip: the largest difference of the clipped value from the old one; None: half the squared error.
    loss_weights: (N,) float32, of each token in the loss of the whole optimizer step.
    Returns the loss () and two means over the trained tokens: value_clip_fraction, the share of values whose clipped
    error is the larger one; critic_squared_error, of the unclipped values.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    plain = (values - returns).square()
    worst = plain
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum(plain, (bounded - returns).square())
    loss = 0.5 * (worst * loss_weights[mask]).sum()
    with torch.no_grad():
        metrics = {
            "value_clip_fraction": TokenMean((worst > plain).sum()),
            "critic_squared_error": TokenMean(plain.sum()),
        }
    return loss, metrics
