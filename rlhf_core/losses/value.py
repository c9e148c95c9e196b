"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, loss_weights: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error, the larger of the plain and the clipped one: the value loss that goes with PPO
    (arXiv:2005.12729, section 3, item 1).

    values, old_values, returns: (N,) float32; mask: (N,) bool, true where the policy sampled.
    clip: how far a value may move from its old one and still be pulled; None: plain half squared error.
    loss_weights: (N,) float32, of each token in the loss of the whole optimizer step.
    Returns the loss () and sums over the trained tokens: clipped_values, those whose clipped error is the larger;
    squared_error_sum, of the values as they are.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    plain = (values - returns).square()
    worst = plain
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum(plain, (bounded - returns).square())
    loss = 0.5 * (worst * loss_weights[mask]).sum()
    with torch.no_grad():
        metrics = {"clipped_values": (worst > plain).sum().float(), "squared_error_sum": plain.sum()}
    return loss, metrics
