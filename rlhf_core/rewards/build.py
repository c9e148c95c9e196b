"""From a config to a reward. A new reward is one file, its config class, and one case here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlhf_core.config.rewards import FunctionReward, RewardModelReward, VerifierReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import Reward
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.rewards.verifier import Verifier


class UserFiles(Protocol):
    """The part of a StageContext that rewards need."""

    def user_file(self, path: str) -> Path: ...


def build_reward(config: RewardModelReward | VerifierReward | FunctionReward, files: UserFiles) -> Reward:
    """The reward of `config`. A reward model is scored by workers of the RL stage, not here: RewardError."""
    match config:
        case VerifierReward():
            return Verifier(config)
        case FunctionReward():
            return RewardFunction(config, files.user_file(config.path))
        case RewardModelReward():
            raise RewardError("a reward model is run by the RL stage's workers; it has no function to call")
