"""What an environment gave for the replies of an episode, as a reward."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.rewards import EnvironmentReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import RewardResult
from rlhf_core.types import Trajectory


class RewardOfEnvironment:
    """The sum over an episode's turns; logged beside it: how many turns there were."""

    @classmethod
    def of(cls, config: EnvironmentReward, context: StageContext) -> RewardOfEnvironment:
        return cls()

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        return RewardResult(
            [t.environment_reward for t in trajectories],
            [None] * len(trajectories),
            {"turns": [float(t.turns) for t in trajectories]},
        )

    def close(self) -> None:
        """No-op: environments are made for each episode."""
