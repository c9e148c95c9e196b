"""Losses of a reward model that learns from pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairwiseLoss = Literal["sigmoid", "logexp"]


def _sigmoid(difference: Tensor) -> Tensor:
    return -logsigmoid(difference)


def _logexp(difference: Tensor) -> Tensor:
    return torch.logaddexp(-difference, torch.zeros_like(difference))


_LOSSES: Mapping[PairwiseLoss, Callable[[Tensor], Tensor]] = {"sigmoid": _sigmoid, "logexp": _logexp}


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor, *, kind: PairwiseLoss = "sigmoid", num_pairs: int | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The Bradley-Terry likelihood of preferences, eq. 1 of arXiv:2203.02155; margins as in eq. 2 of arXiv:2307.09288.

    With x = chosen - rejected - margin: sigmoid is -log sigmoid(x), logexp is log(1 + exp(-x)). They are the same
    function, written twice; both are computed so that no x overflows.
    chosen, rejected: (P,) float32 rewards of each pair; margins: (P,) float32, how far apart they should be at least.
    num_pairs: pairs of the whole optimizer step over all ranks.
    Returns the loss () and sums over the pairs, to be divided by their number: correct_pairs, those whose chosen
    completion has the higher reward (a tie is wrong); reward_gap_sum, of chosen - rejected.
    """
    gap = chosen - rejected
    loss = _LOSSES[kind](gap - margins).sum() / num_pairs
    with torch.no_grad():
        metrics = {"correct_pairs": (gap > 0).sum().float(), "reward_gap_sum": gap.sum()}
    return loss, metrics
