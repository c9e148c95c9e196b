"""The examples of each optimizer step: a pure function of settings, data and seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.training.randomness import derived_seed


def shuffled(count: int, *, seed: int, name: str) -> list[int]:
    """Return 0 .. count - 1 in an order that depends on the arguments alone."""
    generator = torch.Generator().manual_seed(derived_seed(seed, name))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def step_indices(num_examples: int, config: SupervisedConfig, seed: int) -> Iterator[list[int]]:
    """Yield the examples of each optimizer step. An epoch's last step takes all that remain."""
    for epoch in range(config.epochs):
        order = shuffled(num_examples, seed=seed, name=f"epoch {epoch}")
        *others, last = range(0, config.steps_of_epoch(num_examples) * config.batch_size, config.batch_size)
        yield from (order[start : start + config.batch_size] for start in others)
        yield order[last:]
