"""Bounds of a recipe's rewards."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_core.config.rewards.rewards import EnvironmentReward, RewardConfig

Bounds = tuple[float, float]  # the lowest and the highest that a reward may be


def bounds_of_sum(rewards: Iterable[RewardConfig], *, environment: Bounds | None = None) -> Bounds | None:
    """Return the lowest and the highest weighted sum of the rewards; None if not known in advance.

    environment: the bounds of the environment's reward of an episode.
    """
    low = high = 0.0
    for reward in rewards:
        bounds = reward.bounds or (environment if isinstance(reward, EnvironmentReward) else None)
        if reward.weight == 0:
            continue
        if bounds is None:
            return None
        ends = [reward.weight * bound for bound in bounds]
        low, high = low + min(ends), high + max(ends)
    return low, high
