"""The optimizer's parameter groups and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from rlhf_core.config.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total_steps`.

    Rises linearly over ceil(warmup_share * total_steps) steps, the first of which is not 0; then `constant`, or falls
    (`linear`, or along a half `cosine`, arXiv:1608.03983) so that the last step has final_learning_rate_share of it.
    Beyond the last step it stays at the last rate.
    """
    warmup = math.ceil(config.warmup_share * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    falling = max(total_steps - 1 - warmup, 1)
    progress = min((step - warmup) / falling, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * left)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Trained parameters in two groups: matrices decay, vectors (norms, biases) do not. Raises ValueError if none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
