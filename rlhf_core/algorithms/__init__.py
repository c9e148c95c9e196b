"""Every RL algorithm: one small file each, and one line in this table."""

from collections.abc import Mapping

from rlhf_core.algorithms.base import Algorithm
from rlhf_core.algorithms.cispo import CISPO
from rlhf_core.algorithms.dapo import DAPO
from rlhf_core.algorithms.dr_grpo import DrGRPO
from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.algorithms.gspo import GSPO
from rlhf_core.algorithms.ppo import PPO
from rlhf_core.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rlhf_core.algorithms.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from rlhf_core.algorithms.rloo import RLOO
from rlhf_core.config.rl import AlgorithmName, RLConfig

ALGORITHMS: Mapping[AlgorithmName, type[Algorithm]] = {
    "ppo": PPO,
    "reinforce++": ReinforcePlusPlus,
    "reinforce++-baseline": ReinforcePlusPlusBaseline,
    "rloo": RLOO,
    "grpo": GRPO,
    "dr-grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
}


def build_algorithm(config: RLConfig) -> Algorithm:
    return ALGORITHMS[config.algorithm](config.settings)


__all__ = ["ALGORITHMS", "Algorithm", "build_algorithm"]
