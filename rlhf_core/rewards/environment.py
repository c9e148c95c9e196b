"""The reward that an environment returned for the replies of an episode."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.rewards.rewards import EnvironmentReward
from rlhf_core.contract import StageContext
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult
from rlhf_core.types import Trajectory


class RewardOfEnvironment:
    """The sum over an episode's turns, logged with the number of turns."""

    def __init__(self, threshold: float | None = None, *, scored: bool = False) -> None:
        """threshold: sums from this value on count as reward and score 1, all others as 0. scored: the scores are those
        that the episodes' programs returned.
        """
        self._threshold, self._scored = threshold, scored

    @classmethod
    def of(cls, config: EnvironmentReward, context: StageContext) -> RewardOfEnvironment:
        return cls(config.threshold, scored=config.scored)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        turns = {"turns": [float(t.turns) for t in trajectories]}
        sums = [t.environment_reward for t in trajectories]
        if self._scored:
            scores = [t.score for t in trajectories]
            if None in scores:
                raise RewardError(f"completion {scores.index(None)}: its episode has no score, and `scored` is true")
            return RewardResult(sums, scores, turns)
        if self._threshold is None:
            return RewardResult(sums, [None] * len(sums), turns)
        passed = [float(total >= self._threshold) for total in sums]
        return RewardResult(passed, list(passed), turns)

    def close(self) -> None:
        """No-op: environments are created for each episode."""
