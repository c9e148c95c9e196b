"""Sequences, sums and means over the trained tokens of a packed batch.

Values are selected, never multiplied by the mask: a NaN or an infinity at a token that is not trained must not reach
the sum. Losses select their inputs before they compute: the gradient of exp at an infinity is NaN, even times 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(sequence_lengths: Tensor) -> Tensor:
    """(N,) int64: which sequence each token belongs to. sequence_lengths: (S,) int64, sums to N."""
    sequences = torch.arange(sequence_lengths.numel(), device=sequence_lengths.device)
    return torch.repeat_interleave(sequences, sequence_lengths)


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """The sum of `values` times `weights`, both (N,), where `mask` (N,) bool is true, as a scalar ()."""
    return (values[mask] * weights[mask]).sum()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of `values` (N,) where `mask` (N,) bool is true, as a scalar (); 0, with gradient 0, if all are false."""
    return values[mask].sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` (N,) where `mask` (N,) bool is true, as a scalar ().

    Raises ValueError if the mask selects nothing, because the mean is then undefined.
    """
    selected = values[mask]
    if selected.numel() == 0:
        raise ValueError("the mean over no trained token is not defined")
    return selected.mean()
