"""Rewards: one file each. `build_reward` makes the one that a recipe asks for, `open_scorers` several."""

from rlhf_core.rewards.base import Reward, RewardResult
from rlhf_core.rewards.build import build_reward, open_scorers

__all__ = ["Reward", "RewardResult", "build_reward", "open_scorers"]
