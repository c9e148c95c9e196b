"""RL algorithms, one small file each; config/rl/algorithm_table.py lists them."""

from pkgutil import resolve_name

from rlhf_core.algorithms.base import Algorithm
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.stage import RLConfig


def build_algorithm(config: RLConfig) -> Algorithm:
    """Return the implementation of the configured algorithm with its settings."""
    implementation: type[Algorithm] = resolve_name(ALGORITHMS[config.algorithm].implementation)
    return implementation(config.settings)


__all__ = ["Algorithm", "build_algorithm"]
