"""The shift by one token: each token is predicted by the hidden state of the token before it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.types import PackedBatch


def predicted_places(batch: PackedBatch, only: Tensor | None) -> Tensor:
    """(M,) int64: the tokens of `batch` that are not the first of their sequence; among `only` (N,) bool."""
    host = batch.on_host  # where counting them waits for no device
    predicted = host.position_ids != 0
    if only is not None:
        predicted &= host.loss_mask if only is batch.loss_mask else only.cpu()
    return predicted.nonzero().squeeze(-1).to(batch.input_ids.device)


def before(places: Tensor) -> Tensor:
    """The places of the hidden states that predict the tokens at `places`, none of which begins a sequence."""
    return places - 1


def from_before(values: Tensor) -> Tensor:
    """(N,): of each token the value at the token before it; of the first 0."""
    return torch.cat([values.new_zeros(1), values[:-1]])


def at_places(values: Tensor, places: Tensor, batch: PackedBatch) -> Tensor:
    """(N,): `values` (M,) at `places` (M,), and 0 elsewhere."""
    return values.new_zeros(batch.num_tokens).index_put((places,), values)
