"""Builds rewards from their configs. A new reward is one file, its config class, and one case here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rlhf_core.config.rewards import FunctionReward, HTTPReward, ScorerConfig, TextReward, VerifierReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import Reward
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.rewards.http import RewardServer
from rlhf_core.rewards.verifier import Verifier


def build_reward(config: TextReward, context: StageContext) -> Reward:
    """The reward of `config`. Rewards of a reward model are built in rewards/model.py, with the RL stage's workers."""
    match config:
        case VerifierReward():
            return Verifier(config)
        case FunctionReward():
            return RewardFunction(config, context.user_file(config.path))
        case HTTPReward():
            return RewardServer(config)


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
