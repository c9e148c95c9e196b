"""What an environment gave for the replies of an episode, as a reward."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.rewards.rewards import EnvironmentReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import RewardResult
from rlhf_core.types import Trajectory


class RewardOfEnvironment:
    """The sum over an episode's turns; logged beside it: how many turns there were."""

    def __init__(self, threshold: float | None = None) -> None:
        """threshold: the sums from which on an episode's reward, and its score, are 1; those of all others are 0."""
        self._threshold = threshold

    @classmethod
    def of(cls, config: EnvironmentReward, context: StageContext) -> RewardOfEnvironment:
        return cls(config.threshold)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        turns = {"turns": [float(t.turns) for t in trajectories]}
        sums = [t.environment_reward for t in trajectories]
        if self._threshold is None:
            return RewardResult(sums, [None] * len(sums), turns)
        passed = [float(total >= self._threshold) for total in sums]
        return RewardResult(passed, list(passed), turns)

    def close(self) -> None:
        """No-op: environments are made for each episode."""
