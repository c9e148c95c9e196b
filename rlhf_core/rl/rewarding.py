"""Trajectories get their rewards; whatever is wrong with a reward stops the run before it can train anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_core.errors import RewardError
from rlhf_core.rewards import Reward
from rlhf_core.types import Trajectory


def with_rewards(trajectories: Sequence[Trajectory], reward: Reward) -> list[Trajectory]:
    """Rewards, scores and extra figures from a verifier or a user's function."""
    result = reward(*_arguments(trajectories))
    return [
        replace(
            trajectory,
            reward=result.rewards[i],
            score=result.scores[i],
            extra={name: values[i] for name, values in result.extra.items()},
        )
        for i, trajectory in enumerate(trajectories)
    ]


def with_model_rewards(
    trajectories: Sequence[Trajectory], raw: Sequence[float], *, mean: float, std: float
) -> list[Trajectory]:
    """Rewards from the reward model: its raw scores, normalised by the statistics stored with it."""
    for trajectory, value in zip(trajectories, raw, strict=True):
        if not math.isfinite(value):
            raise RewardError(
                f"the reward model gave {value} for prompt {trajectory.prompt.id}: {trajectory.completion!r}"
            )
    return [replace(t, reward=(value - mean) / std) for t, value in zip(trajectories, raw, strict=True)]


def monitor(trajectories: Sequence[Trajectory], monitors: Mapping[str, Reward]) -> dict[str, float]:
    """Mean score of each monitor: logged, never trained on."""
    figures = {}
    for name, scorer in monitors.items():
        rewards = scorer(*_arguments(trajectories)).rewards
        figures[f"monitor/{name}"] = sum(rewards) / len(rewards)
    return figures


def _arguments(trajectories: Sequence[Trajectory]) -> tuple[list[str], list[str], list[dict[str, object]]]:
    completions = [t.completion for t in trajectories]
    prompts = [t.prompt.text for t in trajectories]
    return completions, prompts, [dict(t.prompt.row) for t in trajectories]
