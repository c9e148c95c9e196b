"""A reward of text as a reward of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import Reward, RewardResult

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
