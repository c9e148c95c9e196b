"""Reward shaping: changes the reward of each completion before training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf_core.config.rl.shaping import OverlongConfig, ShapingConfig, TruncationConfig


class Shaping:
    """Overlong penalty, truncation, clipping and running normalisation, in this order, each if it is configured.

    The baseline of a group is subtracted later: clipping bounds rewards, not advantages.
    """

    def __init__(self, config: ShapingConfig, max_tokens: int) -> None:
        """max_tokens: length limit of sampled completions."""
        self._config = config
        self._max_tokens = max_tokens
        self._moments = RunningMoments()

    def __call__(self, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool]) -> list[float]:
        """Return the shaped rewards. lengths: sampled tokens of each completion; truncated: whether it was cut off."""
        shaped = list(rewards)
        config = self._config
        if config.overlong is not None:
            penalties = [overlong_penalty(length, self._max_tokens, config.overlong) for length in lengths]
            shaped = [reward - penalty for reward, penalty in zip(shaped, penalties, strict=True)]
        if config.truncation is not None:
            shaped = [
                _truncated(reward, config.truncation) if cut else reward
                for reward, cut in zip(shaped, truncated, strict=True)
            ]
        if config.clip is not None:
            low, high = config.clip
            shaped = [min(max(reward, low), high) for reward in shaped]
        if config.normalize:
            self._moments.add(shaped)
            shaped = [self._moments.normalised(reward) for reward in shaped]
        return shaped

    def state_dict(self) -> dict[str, float]:
        return self._moments.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._moments.load_state_dict(state)


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig) -> float:
    """Return minus eq. 13 of arXiv:2503.14476, times `penalty`: 0 up to max_tokens - buffer, then linear in the length.

    length: tokens that the policy sampled, including the end-of-text token and excluding those of an environment.
    """
    inside = length - (max_tokens - config.buffer)
    return config.penalty * min(max(inside, 0), config.buffer) / config.buffer


def _truncated(reward: float, config: TruncationConfig) -> float:
    if config.reward is not None:
        return config.reward
    assert config.factor is not None
    # A factor below 1 would increase a negative reward, but truncation must never be rewarded.
    return reward * config.factor if reward > 0 else reward


class RunningMoments:
    """Mean and standard deviation of all rewards so far, by the batched form of Welford's algorithm.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, eq. 2.1.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared differences from the mean
        self._lowest = self._highest = 0.0

    def add(self, values: Sequence[float]) -> None:
        count = len(values)
        if count == 0:
            return
        mean = math.fsum(values) / count
        total = self._count + count
        difference = mean - self._mean
        self._squares += math.fsum((value - mean) ** 2 for value in values)
        self._squares += difference**2 * self._count * count / total
        self._mean += difference * count / total
        extremes = [self._lowest, self._highest, *values] if self._count else values
        self._lowest, self._highest = min(extremes), max(extremes)
        self._count = total

    def normalised(self, value: float) -> float:
        """Return (value - mean) / population standard deviation; 0 while all values are equal."""
        if self._lowest == self._highest:  # the standard deviation may then be a rounding error
            return 0.0
        return (value - self._mean) / math.sqrt(self._squares / self._count)

    def state_dict(self) -> dict[str, float]:
        return {
            "count": self._count,
            "mean": self._mean,
            "squares": self._squares,
            "lowest": self._lowest,
            "highest": self._highest,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._count = int(state["count"])
        self._mean, self._squares = state["mean"], state["squares"]
        self._lowest, self._highest = state["lowest"], state["highest"]
