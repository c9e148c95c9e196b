"""Rewards: one file each. `build_reward` makes the one that a recipe asks for."""

from rlhf_core.rewards.base import Reward, RewardResult
from rlhf_core.rewards.build import build_reward

__all__ = ["Reward", "RewardResult", "build_reward"]
