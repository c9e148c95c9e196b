"""Weights of the tokens in the loss of one optimizer step."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from rlhf_core.types import sequence_ids

Aggregation = Literal["token", "sequence", "constant"]


@torch.no_grad()
def loss_weights(mask: Tensor, sequence_lengths: Tensor, kind: Aggregation, *, length: int) -> Tensor:
    """Return the weight of each trained token, so that the loss is sum_t weight_t * loss_t:

    token: 1 / trained tokens, as in eq. 8 of arXiv:2503.14476;
    sequence: 1 / (trained tokens of its sequence x sequences that have any), as in eq. 3 of arXiv:2402.03300;
    constant: 1 / (sequences x length), as in section 3 of arXiv:2503.20783.
    mask: (N,) bool, true where the token is trained; sequence_lengths: (S,) int64, sums to N. The batch must be that of
    the whole optimizer step over all ranks: only then does the gradient not depend on micro-batching and sharding.
    Returns (N,) float32, 0 where not trained.
    """
    ids = sequence_ids(sequence_lengths)
    ones = mask.double()
    match kind:
        case "token":
            weights = ones / ones.sum().clamp(min=1)
        case "sequence":
            trained = torch.zeros_like(sequence_lengths, dtype=torch.float64).index_add_(0, ids, ones)
            weights = ones / (trained[ids].clamp(min=1) * (trained > 0).sum().clamp(min=1))
        case "constant":
            weights = ones / (sequence_lengths.numel() * length)
        case _:
            assert_never(kind)
    return weights.float()
