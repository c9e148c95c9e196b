"""From a config to a reward. A new reward is one file, its config class, and one case here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlhf_core.config.rewards import FunctionReward, HTTPReward, TextReward, VerifierReward
from rlhf_core.rewards.base import Reward
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.rewards.http import RewardServer
from rlhf_core.rewards.verifier import Verifier


class UserFiles(Protocol):
    """The part of a StageContext that rewards need."""

    def user_file(self, path: str) -> Path: ...


def build_reward(config: TextReward, files: UserFiles) -> Reward:
    """The reward of `config`. Those of a reward model are made by rewards/model.py, with the RL stage's workers."""
    match config:
        case VerifierReward():
            return Verifier(config)
        case FunctionReward():
            return RewardFunction(config, files.user_file(config.path))
        case HTTPReward():
            return RewardServer(config)
