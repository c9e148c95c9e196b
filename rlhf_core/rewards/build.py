"""Construction of rewards from their configs; config/rewards/rewards.py lists them in its table REWARDS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any

from rlhf_core.config.rewards.rewards import REWARDS, GroupReward, RewardConfig, TextReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import Reward, TrajectoryReward
from rlhf_core.rewards.text import RewardOfGroups, RewardOfText


def implementation_of(config: RewardConfig) -> Any:
    """Return the table's class for the reward of `config`."""
    return resolve_name(REWARDS[config.type].implementation)


def build_text_reward(config: TextReward, context: StageContext) -> Reward:
    reward: Reward = implementation_of(config).of(config, context)
    return reward


def build_reward(config: RewardConfig, context: StageContext) -> TrajectoryReward:
    """Build the reward of `config`.

    Rewards of a reward model are built in rewards/model.py, with the RL stage's workers.
    """
    if isinstance(config, TextReward):
        return RewardOfText(build_text_reward(config, context))
    implementation = implementation_of(config).of(config, context)
    reward: TrajectoryReward = RewardOfGroups(implementation) if isinstance(config, GroupReward) else implementation
    return reward


@contextmanager
def open_rewards(configs: Mapping[str, RewardConfig], context: StageContext) -> Iterator[dict[str, TrajectoryReward]]:
    """Build the rewards of `configs` by name; they are closed at the end."""
    with ExitStack() as stack:
        rewards: dict[str, TrajectoryReward] = {}
        for name, config in configs.items():
            rewards[name] = build_reward(config, context)
            stack.callback(rewards[name].close)
        yield rewards
