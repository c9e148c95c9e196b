"""Pointwise losses of reward models: rewards are trained on labels or targets, not on comparisons."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from rlhf_core.metrics import LossAndMetrics, Sum


def step_loss(rewards: Tensor, labels: Tensor, *, num_steps: int) -> LossAndMetrics:
    """Binary cross-entropy of sigmoid(reward) and the label of each step, arXiv:2305.20050; for soft labels 2312.08935.

    rewards: (K,) float32, the logit that the step is right; labels: (K,) float32 from 0 to 1. num_steps: of the whole
    optimizer step over all ranks.
    Returns the loss () and two means over the steps: accuracy, the share whose reward and label are on the same side of
    0 and of 1/2 (on the boundary counts as the wrong side); positive_share, the share of labels above 1/2.
    """
    loss = binary_cross_entropy_with_logits(rewards, labels, reduction="sum") / num_steps
    with torch.no_grad():
        positive = labels > 0.5
        accuracy = ((rewards > 0) == positive).sum() / num_steps
        return loss, {"accuracy": Sum(accuracy), "positive_share": Sum(positive.sum() / num_steps)}


def regression_loss(rewards: Tensor, targets: Tensor, *, num_completions: int) -> LossAndMetrics:
    """Mean of (reward - target)^2, as HelpSteer2's reward models are trained, arXiv:2406.08673.

    rewards, targets: (K,) float32 of each completion. num_completions: of the whole optimizer step over all ranks.
    Returns the loss () and absolute_error, the mean of |reward - target|.
    """
    loss = mse_loss(rewards, targets, reduction="sum") / num_completions
    return loss, {"absolute_error": Sum((rewards.detach() - targets).abs().sum() / num_completions)}
