"""Every RL algorithm: one small file each, and one line in this table."""

from rlhf_core.algorithms.base import Algorithm
from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.algorithms.ppo import PPO
from rlhf_core.config.rl import RLConfig

ALGORITHMS = {"ppo": PPO, "grpo": GRPO}


def build_algorithm(config: RLConfig) -> Algorithm:
    algorithm: Algorithm = ALGORITHMS[config.algorithm](config.settings)
    return algorithm


__all__ = ["ALGORITHMS", "Algorithm", "build_algorithm"]
