"""Rewards, one per file. `build_reward` builds the reward of a config, `open_scorers` several."""

from rlhf_core.rewards.base import Reward, RewardResult
from rlhf_core.rewards.build import build_reward, open_scorers

__all__ = ["Reward", "RewardResult", "build_reward", "open_scorers"]
