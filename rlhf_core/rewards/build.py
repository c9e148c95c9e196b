"""From a config to a reward. A new reward is one file, its config class, and one case here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from rlhf_core.config.rewards import FunctionReward, HTTPReward, ScorerConfig, TextReward, VerifierReward
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


@contextmanager
def open_scorers(configs: Mapping[str, ScorerConfig], files: UserFiles) -> Iterator[dict[str, Reward]]:
    """The scorers of `configs` by name, closed at the end."""
    with ExitStack() as stack:
        scorers: dict[str, Reward] = {}
        for name, config in configs.items():
            scorers[name] = build_reward(config, files)
            stack.callback(scorers[name].close)
        yield scorers
