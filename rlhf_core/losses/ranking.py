"""Losses of reward models that are trained on preference pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.metrics import LossAndMetrics, Sum


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor, *, num_pairs: int, centring: float = 0.0
) -> LossAndMetrics:
    """The Bradley-Terry likelihood of preferences, eq. 1 of arXiv:2203.02155; margins as in eq. 2 of arXiv:2307.09288.

    With x = chosen - rejected - margin: -log sigmoid(x), which is log(1 + exp(-x)), without overflow for any x; plus
    centring x (chosen + rejected)^2, since only differences are learned and their mean could drift (arXiv:2312.09244).
    chosen, rejected: (P,) float32 rewards of each pair; margins: (P,) float32, the minimum difference of the two.
    num_pairs: pairs of the whole optimizer step over all ranks.
    Returns the loss () and two means over the pairs of the step: accuracy, the share of pairs whose chosen completion
    has the higher reward (a tie is wrong); reward_gap, the mean of chosen - rejected.
    """
    gap = chosen - rejected
    loss = (centring * (chosen + rejected).square() - logsigmoid(gap - margins)).sum() / num_pairs
    with torch.no_grad():
        metrics = {"accuracy": Sum((gap > 0).sum().float() / num_pairs), "reward_gap": Sum(gap.sum() / num_pairs)}
    return loss, metrics
