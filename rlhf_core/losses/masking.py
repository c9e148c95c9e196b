"""Sums over the trained tokens of a packed batch.

Values are selected by the mask, never multiplied by it: a NaN or an infinity at a token that is not trained must not
reach the sum. Losses select their inputs before they compute, because the gradient of exp at infinity is NaN even when
it is multiplied by 0.
"""

from __future__ import annotations

from torch import Tensor


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` times `weights`, both (N,), where `mask` (N,) bool is true, as a scalar ()."""
    return (values[mask] * weights[mask]).sum()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` (N,) where `mask` (N,) bool is true, as a scalar (); 0, with gradient 0, if all are
    false.
    """
    return values[mask].sum()
