"""Rewards, one per file. `open_rewards` builds those of a recipe."""

from rlhf_core.rewards.base import Reward, RewardResult, TrajectoryReward
from rlhf_core.rewards.build import build_reward, build_text_reward, open_rewards

__all__ = ["Reward", "RewardResult", "TrajectoryReward", "build_reward", "build_text_reward", "open_rewards"]
