"""Rewards, one per file. `build_reward` builds the reward of a config, `open_scorers` several."""

from rlhf_core.rewards.base import Reward, RewardResult, TrajectoryReward
from rlhf_core.rewards.build import build_episode_reward, build_reward, open_scorers

__all__ = ["Reward", "RewardResult", "TrajectoryReward", "build_episode_reward", "build_reward", "open_scorers"]
