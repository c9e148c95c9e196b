"""Builds rewards from their configs; config/rewards.py lists them in its table REWARDS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from rlhf_core.config.rewards import REWARDS, EpisodeReward, RewardConfig, ScorerConfig, TextReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import Reward, TrajectoryReward


def implementation_of(config: RewardConfig) -> Any:
    """The class that the table names for the reward of `config`."""
    module, _, name = REWARDS[config.type].implementation.partition(":")
    return getattr(import_module(module), name)


def build_reward(config: TextReward, context: StageContext) -> Reward:
    """The reward of `config`. Rewards of a reward model are built in rewards/model.py, with the RL stage's workers."""
    reward: Reward = implementation_of(config).of(config, context)
    return reward


def build_episode_reward(config: EpisodeReward, context: StageContext) -> TrajectoryReward:
    reward: TrajectoryReward = implementation_of(config).of(config, context)
    return reward


@contextmanager
def open_scorers(
    configs: Mapping[str, ScorerConfig] | Mapping[str, TextReward], context: StageContext
) -> Iterator[dict[str, Reward]]:
    """The rewards of `configs` by name, closed at the end."""
    with ExitStack() as stack:
        scorers: dict[str, Reward] = {}
        for name, config in configs.items():
            scorers[name] = build_reward(config, context)
            stack.callback(scorers[name].close)
        yield scorers
