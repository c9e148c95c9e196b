"""Rewards of text as rewards of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import GroupReward, Reward, RewardResult, TextGroup, TrajectoryReward

if TYPE_CHECKING:
    from rlhf_core.types import Trajectory  # which loads torch; preflight does not


@dataclass(frozen=True, slots=True)
class RewardOfText:
    """Passes the reward the last reply of an episode, and its prompt."""

    reward: Reward

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        rows = [dict(t.prompt.row) for t in trajectories]
        result = self.reward([t.completion for t in trajectories], [t.prompt.text for t in trajectories], rows)
        if result.steps is not None and any(t.turns > 1 for t in trajectories):
            raise RewardError("a reward gives `steps`, but of an episode of several turns it sees the last reply alone")
        return result

    def close(self) -> None:
        self.reward.close()


@dataclass(frozen=True, slots=True)
class RewardOfGroups:
    """Passes the reward the last replies of all episodes of a prompt."""

    reward: GroupReward

    def of_groups(self, groups: Sequence[Sequence[Trajectory]]) -> RewardResult:
        """Return the rewards of the trajectories of all groups, one after the other."""
        return self.reward(
            [TextGroup([t.completion for t in group], group[0].prompt.text, group[0].prompt.row) for group in groups]
        )

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        """Reward the trajectories of one prompt. Raises RewardError if they are of several."""
        if len({t.prompt.id for t in trajectories}) > 1:
            raise RewardError("a reward of groups got the completions of several prompts as one group")
        return self.of_groups([trajectories])

    def close(self) -> None:
        self.reward.close()


def rewarded(reward: TrajectoryReward, groups: Sequence[Sequence[Trajectory]]) -> RewardResult:
    """Return the rewards of the trajectories of all groups, one after the other. groups: none is empty."""
    if isinstance(reward, RewardOfGroups):
        return reward.of_groups(groups)
    return reward([trajectory for group in groups for trajectory in group])
